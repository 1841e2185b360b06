"""Plans from schedules: placement of buffers, choice of a schedule, plans for a single rank. Does not import torch."""
