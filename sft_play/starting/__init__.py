"""A run from request to end: `start_run` has the steps in their order.

It counts the rows (`row_survey`), plans (`plan_stages` for a run and its stages, `plan_run` for one plan with what this
machine knows, and what a stopped run keeps), and trains: `train_in_process` in this process, `launch_ranks` over
several, and is one of them.
"""
