"""The face of ``torch.optim``: groups, verbs, state, and the one place where a step is committed."""
