"""From a request to its result: which processes train a run, started, and waited for. Knows
processes, and loads no torch but where its launcher runs, where nodes meet, and where a run begins.

`start` has the steps of every start in their order: a LaunchRequest becomes a LaunchPlan, and that
a LaunchResult.

- The request: `request` (make's variables, and what a launcher, accelerate's file and a mesh add to
  them; a run that was stopped, or died, and goes on), `run_hardware` (the hardware as the run uses
  it).
- The plan: `row_survey` (the lengths of the rows), `planning` (what a run is refused for before a
  library is loaded, of layouts the planner says it; the plan asked for once, completed with what
  this machine knows, made).
- The processes: `ranks` (started, waited for, and their end), `agent` (which starts and watches
  them in torchrun's place), `nodes` (several machines meet), `tensorboard` (beside them).
- Other programs' words: `torchrun` (its command, and what launchers export), `accelerate`, and
  `deepspeed` (its configuration with the plan's values).
"""
