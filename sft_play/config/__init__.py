"""A run YAML to `RunConfig` (`schema`): strict, with every problem at once.

`load` is the way in: `yaml_io` reads the text with its lines, `SET=` and the settings of the
adapter that a run continues are put into its data; `validation` makes it a `RunConfig` and looks
for contradictions. `other_tools` answers keys that are not ours, `translated` makes a run YAML of
another tool's file. `options` is the schema as a table, from which the reference and messages are
written, with the options that Trainer, DeepSpeed and peers have too.
"""
