"""What needs a GPU: run by `make gpu-check`, rehearsed on CPU by `tests/test_gpu_rehearsal.py`."""
