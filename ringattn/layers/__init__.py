"""Attention as `torch.nn` modules, and the projections and rotations inside them."""
