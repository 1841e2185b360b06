"""The checks that need a GPU. `make gpu-check` runs them; `tests/gpu/test_rehearsal.py` rehearses them on the CPU."""
