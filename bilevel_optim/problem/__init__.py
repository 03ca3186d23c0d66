"""User input (parameters, losses with their data, tasks), vectors and random numbers."""
