"""Checks of the hypergradient: `check_hypergradient` and its independent reference."""
