"""Regular packages, so that no other package called `tests` is found in their place."""
