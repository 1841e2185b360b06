"""From schedules to plans: placement, choice, and plans made for one rank alone. Knows no torch."""
