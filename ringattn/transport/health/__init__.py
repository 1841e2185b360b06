"""Liveness of a ring: what each rank says of itself, what it observes of the others, and which rank is at fault.

Every transport reports to one `Health` per rank and asks it after every failure.
"""
