"""DeepSpeed's configuration file, from a person's text to a configuration in which nothing is open.

In the order of use: `files` reads it, `translate` brings it to current keys and checks their values, `files` says what
it decides (the ZeRO layout, batch, dtypes), and after the plan is made `fill` resolves every "auto".
"""
