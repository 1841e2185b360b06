"""The execution of plans: the executor, its buffers and messages, and the state of a rank between calls."""
