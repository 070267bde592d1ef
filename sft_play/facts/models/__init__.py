"""Models: what a `config.json` means, in numbers of elements."""
