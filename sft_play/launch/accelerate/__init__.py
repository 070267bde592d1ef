"""accelerate's configuration file: found (`places`), read (`reading`), written (`writing`, for these `machines`).

`overridden` says where the plan, the run YAML or the machine wins over it; `launched` is the same for the variables that
`accelerate launch` sets.
"""
