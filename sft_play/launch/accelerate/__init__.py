"""accelerate's configuration file: found and read (`reading`), written for this machine (`writing`).

`launched` reads the variables by which `accelerate launch` hands the same choices to the processes that it starts.
"""
