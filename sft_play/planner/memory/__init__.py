"""The estimate of a step's memory on one rank: autograd over sizes, without tensors and without torch, in milliseconds.

From the whole to its parts: `estimate` takes the largest phase and adds slack, margin and context;
`step_memory` simulates the step. `block` has what its parts hold and use (or, of a class that was measured,
`measured_walk`), `model_states` what stays between steps, `gather` what a sharded model gathers, `loading_and_saving`
what those two take. A block is made as its `structure` says, of `self_attention` and `mlp`, those of `linear` and other
`operations`, which a `tape` records as autograd would.
"""
