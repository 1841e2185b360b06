"""Attention as `torch.nn` modules, and the projections and rotations inside them."""

PREFETCH_BYTES = 2**29
"""Larger inputs of checkpoints in host memory are copied back when they are used, see `layers.tiled`. A second input on
the device would shorten the longest sequence, and attention to that many tokens takes much longer than the copy. The
planner reads this number without importing torch."""
