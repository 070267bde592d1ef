"""Raw files → checked conversations or text → tokens with a loss mask. Heavy libraries are imported lazily."""
