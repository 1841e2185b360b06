"""The fuzzer: drawn uses of the public face against an independent dense reference. `python -m tests.fuzz` runs it."""
