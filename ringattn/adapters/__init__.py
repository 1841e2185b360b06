"""Attention backends for other people's trainers; each module imports its host only when it is used."""
