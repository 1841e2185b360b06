"""Runs every model class of the installed transformers over a ring of two ranks: exact, or refused by name."""
