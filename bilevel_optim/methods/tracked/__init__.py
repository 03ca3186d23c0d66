"""Single-loop methods that remember estimates of each lower problem."""
