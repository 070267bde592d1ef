"""Documents to clean text: an optional part (`sft-play[documents]`)."""
