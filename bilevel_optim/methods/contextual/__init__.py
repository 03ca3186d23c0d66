"""Methods for contextual problems, with a fresh lower problem at every draw."""
