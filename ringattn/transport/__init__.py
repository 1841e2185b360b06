"""Ways for the ranks of one ring to exchange bytes; `base` is the contract."""
