"""What the user hands over: parameters, losses with their data, tasks; vectors, and random numbers."""
