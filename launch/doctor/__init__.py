"""What is wrong: of a machine, and of a run that failed."""
