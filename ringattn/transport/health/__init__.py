"""Liveness of a ring: each rank's heartbeat, its observations of the others, and which rank is at fault.

Every transport reports to one `Health` per rank and calls it after every failure.
"""
