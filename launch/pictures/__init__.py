"""The commands that print and draw schedules, simulations and recorded passes."""
