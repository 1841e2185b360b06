"""NCCL and CUDA without a GPU: a strict simulator whose ranks are threads of one process.

Start reading at `world.py`. The NCCL transport uses it through `library.py` and `device.py`.
"""
