"""What needs a GPU: run by `make gpu-check`, rehearsed on CPU by `tests/gpu/test_rehearsal.py`."""
