"""The names that options can have, where a command's `--help` needs them: what defines them imports torch.

Not covered: what they stand for; tests/launch/test_help.py holds them to it.
"""

ENGINES = ("auto", "aten", "plain", "triton", "fa3", "fa4")
TRANSPORTS = ("auto", "local", "shm", "gloo", "nccl", "peer")
DTYPES = ("fp64", "fp32", "bf16", "fp16")
