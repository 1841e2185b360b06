"""Copy engines between the GPUs of one node: no multiprocessor works on an exchange."""
