"""A GPU of processes on CPU: allocations are memfds, streams are threads."""
