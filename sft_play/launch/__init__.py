"""From what was asked for to running ranks: options, nodes, the launcher's command, and the engines' files. No torch.

`launch_options` reads make's variables and adds what accelerate's file (`accelerate`) and the mesh say; `machine` is
the hardware as the ranks will use it. Nodes meet first (`training/ranks/node_meeting`), then `command` words torchrun's
command, and `starting/launch_ranks` runs it. `exported` reads what another launcher has set.
"""
