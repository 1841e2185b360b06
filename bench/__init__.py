"""Benchmarks. Each checks that results are correct before it prints a number."""
