"""A model: one number."""


def grow(value, step, rate):
    """The next value."""
    return value + rate * (step + 1)
