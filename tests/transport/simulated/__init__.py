"""NCCL and CUDA without a GPU: a strict simulator whose ranks are threads of one process.

Start reading at `world.py`; `library.py` and `device.py` are what the NCCL transport sees of it.
"""
