"""Stochastic methods with second derivatives, in one loop or two."""
