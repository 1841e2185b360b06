"""A model checker for exchanges through shared memory: it runs the transports' own programs in every order."""
