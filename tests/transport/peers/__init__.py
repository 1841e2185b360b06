"""A simulated GPU for processes on a CPU: allocations are memfds, streams are threads."""
