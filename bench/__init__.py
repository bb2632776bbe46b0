"""``python -m bench NAME``: benchmarks that print a table and can write JSON."""
