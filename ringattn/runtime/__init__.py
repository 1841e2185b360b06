"""Runs plans: the executor, its buffers and messages, and what a rank keeps between calls."""
