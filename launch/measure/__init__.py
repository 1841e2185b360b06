"""Measured attention calls: one, many, against a reference, and as constants of a machine."""
