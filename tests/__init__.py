"""The tests, a regular package, so that Python does not find another package called `tests` in its place."""
