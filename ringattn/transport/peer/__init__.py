"""Copy engines between the GPUs of one node: an exchange occupies no multiprocessor."""
