"""How much memory training takes, and what fits."""
