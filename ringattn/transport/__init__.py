"""Transports, which exchange bytes between the ranks of one ring; `base` is the contract."""
