"""What is given before a plan is made: the machine, the model's shape, and what is installed. No torch.

The machine: `hardware` (named: `machine_spec`; found: `host`, and in `gpus` `visible_gpus`, `nvml`), with rates
from `gpu_catalog`; `unusable_accelerators` and `compiler` say why a GPU or a kernel would not run. The model, in
`models`: `architecture` finds its config.json, `decoder` lays out its blocks by `families`, `config_fields` and
`class_defaults`, and `model_shape` is the result. What was measured is kept by `installed.load_or_measure`,
and `installed` is what is known of packages; tables are JSON files beside their modules.
"""
