"""The engines: `base` defines their contract, `select` chooses one, and `plain`, `aten`, `flash` and `triton` compute.

This package imports nothing itself, so that `rectangles` can be read without torch.
"""
