"""accelerate's configuration file: found, read, written, and compared with the run."""
