"""accelerate's configuration file: found (`places`), read (`reading`), written (`writing`, for these `machines`).

`overridden` says where the plan, the run YAML or the machine wins over it. `launched` reads the variables by which
`accelerate launch` hands the same choices to the processes that it starts.
"""
