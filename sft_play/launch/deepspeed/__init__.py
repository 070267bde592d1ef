"""DeepSpeed's configuration file, from a person's text to a configuration in which nothing is open.

In the order of use: `files` reads it, `translate` brings it to current `keys` and checks their values, `layout` says
which ZeRO layout it asks for, `run_settings` what it decides about the run, and after the plan is made `fill` resolves
every "auto".
"""
