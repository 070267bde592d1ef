"""Build token rows from data files: read, count, mix, pack and split them, and cache the result."""
