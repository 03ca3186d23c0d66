"""The only code that evaluates a user's loss: derivatives at given points, of one problem or of many at once."""
