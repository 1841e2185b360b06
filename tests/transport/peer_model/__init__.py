"""A model of exchanges through shared memory that runs the transports' own programs in every order."""
