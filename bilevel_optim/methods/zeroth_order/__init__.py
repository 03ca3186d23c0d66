"""Methods that perturb x and look at what the lower solve does."""
