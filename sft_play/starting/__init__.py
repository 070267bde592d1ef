"""A run from the request to its end: `one_process`, `several_ranks` (their parent) and `one_rank` tell it from the top.

`before` refuses what needs no library, `row_survey` counts the rows, `plan_run` and `over_ranks` make the plan, `resumed`
says what a stopped run keeps, `measured` remembers what was measured.
"""
