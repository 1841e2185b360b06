"""Liveness of a ring: heartbeats of the ranks, their observations of each other, and which rank is at fault.

Each rank has one `Health`. Its transports report to it, and ask it after every failure which rank is at fault.
"""
