"""Speed and memory, measured in one run and printed as a table; not part of the tests."""
