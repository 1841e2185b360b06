"""Raw NCCL: one process per GPU, called directly and not through `torch.distributed`."""
