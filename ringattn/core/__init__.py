"""What a call is: positions, masks, layouts and their tiles, free of torch."""
