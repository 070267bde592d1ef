"""Facts: the machine there is (or that a user names), and what a model's `config.json` means. No torch."""
