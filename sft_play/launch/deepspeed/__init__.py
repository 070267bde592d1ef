"""DeepSpeed's configuration file, from a person's text to a configuration in which nothing is open.

`files` reads it, brings it to current keys, checks their values and says what it decides (the ZeRO layout, batch,
dtypes); after the plan is made `fill` (the module) resolves every "auto".
"""
