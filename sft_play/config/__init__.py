"""Intent: strict YAML to a frozen `RunConfig`; the only place with defaults."""
