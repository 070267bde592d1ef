"""Pages about runs: curves, figures, comparisons."""
