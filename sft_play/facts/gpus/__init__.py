"""GPUs: what drivers say of them, and what is known of each by its name."""
