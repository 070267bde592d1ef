"""Measurements of this toolkit, and scores against what others measured and published."""
