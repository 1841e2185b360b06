"""A strict simulator of NCCL and CUDA, without a GPU. The ranks are threads of one process.

Start reading at `world.py`. The NCCL transport uses it through `library.py` and `device.py`.
"""
