"""The estimate of a step's memory on one rank: autograd over sizes, without tensors and without
torch, in milliseconds.

From the whole to its parts: `estimate` takes the largest phase and adds slack, margin and context;
`step_memory` simulates the step, with the bytes that `block` predicts or that were measured;
`model_states` is what stays between steps and what a sharded model gathers. A block is made as its
`structure` says, of operations that a `tape` records as autograd would.
"""
