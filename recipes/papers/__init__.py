"""The experiments of five papers as data, one runner for all of them, and verdicts that are computed."""
