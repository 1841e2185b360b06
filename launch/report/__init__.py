"""Reports of a sweep: tables and charts of its results."""
