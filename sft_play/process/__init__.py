"""This process and those that it starts: variables that they are given (`variables`, `environment`), their memory
(`heap`), how they end (`endings`), and how a failure is told across ranks (`failures`)."""
