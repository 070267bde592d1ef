"""Data files to token rows: read, counted, mixed, packed, split, and kept in a cache."""
