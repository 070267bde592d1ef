"""Commands that show the machine and what runs on it."""
