"""The estimate of a step's memory on one rank: autograd over sizes, without tensors and without torch, in milliseconds.

From the whole to its parts: `estimate` takes the largest moment and adds slack, margin and context (`margins`);
`step_memory` walks through the step. `block` and `lm_head` are what its parts hold and use, `model_states` what stays
between steps, `gather` what a sharded model gathers, `loading` and `saving` what those two take. A block is made of
`self_attention` and `mlp`, those of `linear`, `norms` and other `operations`, which a `tape` records as autograd would.
"""
