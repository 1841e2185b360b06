"""Launching ranks, scaling sweeps and the demo; uses the public face only."""
