"""Is the gradient right? `check_hypergradient` and its independent reference."""
