"""Experiments of five papers as data, with one runner and computed verdicts."""
