"""This process and those that it starts: variables that they are given (`variables`, `environment`), their memory
(`imports`), how they end (`signals`), and how a failure is told across ranks (`failures`)."""
