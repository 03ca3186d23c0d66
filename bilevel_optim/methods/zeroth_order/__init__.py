"""Methods that perturb x and observe the response of the lower solve."""
