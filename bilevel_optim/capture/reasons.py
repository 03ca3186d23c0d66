"""Why a step is not captured."""

__all__ = ["Uncapturable"]


class Uncapturable(Exception):
    """A step cannot be captured, for the reason given."""
