"""A run YAML to `RunConfig` (`schema`): strict, with every problem at once.

`load` is the way in: `yaml_io` reads the text with its lines, `overrides` puts `SET=` into it, `validation` makes it a
`RunConfig` and looks for contradictions. `unknown_keys` and `other_tools` answer keys that are not ours. `leaves` is
the schema as a table, from which `reference` and messages are written; `training_options` is the part of it that
Trainer, DeepSpeed and peers have too.
"""
