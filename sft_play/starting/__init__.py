"""A run from request to end: in `one_process`, as the parent of `several_ranks`, or as `one_rank` of them.

`before` refuses what needs no library, `row_survey` counts the rows, `plan_run` and `over_ranks` make the plan,
`resumed` says what a stopped run keeps, `measured` remembers what was measured.
"""
