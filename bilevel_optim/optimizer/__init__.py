"""The ``torch.optim`` interface: parameter groups, public methods, state, and the commit of a step."""
