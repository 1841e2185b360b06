"""What a rank saw, kept for afterwards."""
