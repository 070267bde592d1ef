"""What is decided before weights are read: tokenizer, model class, adapters, attention, the
machine."""
