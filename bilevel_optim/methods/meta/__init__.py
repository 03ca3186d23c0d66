"""Meta-learning of an initial point."""
