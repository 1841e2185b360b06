"""Checks that every model class of the installed transformers is exact over a ring of two ranks, or refused by name."""
