"""Random numbers by counter, and directions made of them that are never stored."""
