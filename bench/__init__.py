"""Benchmarks; none prints a number before its correctness gate is green."""
