"""Schedules as values: the messages and the work of every rank in every step. Does not import torch."""
