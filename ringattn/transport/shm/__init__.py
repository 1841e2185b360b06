"""Messages between processes of one machine, through memory that they share."""
