"""The commands that run attention calls: `run`, `sweep`, `check` (against a reference) and `calibrate`."""
