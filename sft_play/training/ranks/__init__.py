"""Several processes as one run: process group, engines, the agent that reports a failure once."""
