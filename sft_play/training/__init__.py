"""The heavy part: tokenizer, model, TRL's trainer, engines, checkpoints. Imports torch.

Begin with `run`, the story of a run; `job` is what it is to do. Beside them what concerns its ranks: `distributed`
(process group, agreement), `engines` (DDP, FSDP2, DeepSpeed, and the check that they run), `heartbeat`. A folder for
each part:

- `prepare/`, what is decided before weights are read: `prepare`, `tokenizer`, `model_spec`, `lora_config`,
  `experts`, `base_adapter`, `device_checks`, `run_folder`, `quiet`.
- `class_checks/`, measured in place of lists of names: `small_model` of a class, `masking` (do chats of a row stay
  apart, by a mask or by boundaries; does padding need a mask), `adapter_trial` (which layers take an adapter), `proof`
  (does other code compute the same) with `kernels` (Liger's) and `compiling` (torch.compile).
- `model/`: `model_loading`, `nf4_experts` (in 4 bits), `language_model` (of an image-text class), `fsdp_loading`
  (FSDP2, unit by unit), `adapter_start` (PiSSA, LoftQ), `adapter_inputs`, `sdpa`, `varlen`, `context_parallel`,
  `tensor_parallel`, `fused_head`.
- `loop/`: `load_trainer`, `trainer` (TRL's), `loop`, `loop_checkpoints`, `upstream` (private names of the libraries,
  guarded), `rows` and `collate` (from rows to micro-batches), `optimizers`, `callbacks`, `finite` (steps that are not),
  `memory` (steps that run out of it), `curriculum` (stages).
- `checkpoints/`, and the final weights: `checkpoints` (whole or absent), `last_checkpoint`,
  `full_state_dict`, `sharded_checkpoints`, `universal` (ZeRO's over other ranks),
  `model_saving`, `tensor_files`, `consolidate`, `card`.
- `measure/`: `monitor`, `peaks`, `updates`, `profile`, `board`, `evaluate`, `exact_match`,
  `recorded` (for later plans), `summary`.
- `unsloth/`, in processes of its own: `bridge` on this side; `unsloth_worker` and `unsloth_run` on
  that side.
"""
