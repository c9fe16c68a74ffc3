"""Data sets, splits and protocols (layer 1)."""
