"""The description of a call: positions, masks, layouts and their tiles. Does not import torch."""
