"""The engines: `base` is what one promises, `select` chooses one, `plain` and `aten` compute.

Imports nothing, so that `rectangles` can be read without torch.
"""
