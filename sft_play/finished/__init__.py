"""What is done with a finished run: it answers, is evaluated, exported, reported, listed and
removed.

`run` opens a run folder and writes beside it, `respond` loads its model.

- Answers: `respond` (in the terminal, over files, and for the others), `serve` and `openai` (over
  HTTP).
- Is it better? `evaluation` by `metrics`; `ship` judges what it measures for `make ship`.
- Pages: `report` has those of `make report` and `make compare`.
- `listing` lists and removes runs, `reproduce` trains one again. `export/` makes the model ready
  for others.
"""
