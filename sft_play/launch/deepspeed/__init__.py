"""DeepSpeed's configuration file: read as people write it, translated to current keys, and filled in from the plan."""
