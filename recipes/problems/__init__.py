"""Data sets and losses that several programs use."""
