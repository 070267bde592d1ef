"""What is done with a finished run: its weights merged, compared, used."""
