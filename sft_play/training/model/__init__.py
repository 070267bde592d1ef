"""The model: read, sharded, quantised, with its adapters and its attention."""
