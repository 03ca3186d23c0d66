"""The lower problem and the linear system."""
