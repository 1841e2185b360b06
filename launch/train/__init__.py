"""Training a byte-level language model whose sequences are split over ranks."""
