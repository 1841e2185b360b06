"""The fuzzer: random uses of the public API against an independent dense reference. `python -m tests.fuzz` runs it."""
