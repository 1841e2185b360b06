"""Observation of a rank: flight records, memory readings and recordings."""
