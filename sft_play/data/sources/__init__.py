"""Paths to conversations: files in every form that people have, read row by row."""
