"""Liveness of a ring: heartbeats of the ranks, their observations of each other, and which rank is at fault.

Each rank has one `Health`. Its transports report their state to it, and after a failure it names the rank at fault.
"""
