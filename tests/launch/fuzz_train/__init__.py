"""Drawn training runs with a fault each: what they come to is the run that nothing happened to, or a named error."""
