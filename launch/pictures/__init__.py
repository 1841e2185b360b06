"""Schedules and recorded passes, printed and drawn."""
