"""The starter task: a small generated language, so that training works with nothing to download."""
