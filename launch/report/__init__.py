"""What a sweep found, as tables and charts."""
