"""Memory, words and file descriptors that the ranks of one machine share."""
