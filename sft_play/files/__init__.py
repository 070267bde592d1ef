"""Files of the machine: written whole or not at all (`atomic`), kept for later runs (`cache`), of the project's own
checkout (`checkout`)."""
