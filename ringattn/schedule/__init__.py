"""Who sends what to whom, when, and who computes what: schedules as values. Knows no torch."""
