"""Benchmarks of speed and memory, each printed as a table; not part of the tests."""
