"""A trained model answers: in the terminal, over files, over HTTP."""
