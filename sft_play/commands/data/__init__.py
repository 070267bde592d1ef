"""Commands on data: made, shown, checked."""
