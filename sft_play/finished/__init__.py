"""What is done with a finished run: it answers, is evaluated, exported, reported, listed and removed.

`run` opens a run folder and writes beside it, `load` loads its model; `listing` lists and removes runs; `reproduce`
trains one again. The rest is in a folder each: `answer`, `evaluate`, `export`, `report`.
"""
