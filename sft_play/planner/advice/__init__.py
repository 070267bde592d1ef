"""What would fit where a plan does not, and what the largest is that does."""
