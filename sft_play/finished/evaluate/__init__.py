"""Is it better? Held-out rows, benchmarks, general ability, and the decision to ship."""
