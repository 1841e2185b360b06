"""The checks that need a GPU. `make gpu-first` runs them; `tests/gpu/test_rehearsal.py` rehearses them on the CPU."""
