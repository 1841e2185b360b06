"""Training of a small language model whose sequences are sharded over ranks."""
