"""The heavy part: tokenizer, model, TRL's trainer, engines, checkpoints. Imports torch, but for
job.py.

Begin with `run`, the story of a run; `job` is what it is to do, and
what later plans remember of it. Beside them what concerns its
ranks: `distributed` (process group, agreement), `engines` (DDP, FSDP2, DeepSpeed, and the check
that they run), `heartbeat`. A folder for each part:

- `prepare/`, what is decided before weights are read: `prepare`, `tokenizer`, `model_spec`,
  `lora_config`, `experts`, `device_checks`, `run_folder`, `library_messages` (silenced).
- `class_checks/`, measured in place of lists of names: `small_model` of a class, `masking` (do
  chats of a row stay apart, by a mask or by boundaries; does padding need a mask), `adapter_trial`
  (which layers take an adapter), `replaced_code` (do Liger's kernels, compiled blocks, attention
  by boundaries and adapters in groups compute the same).
- `model/`: `model_loading` (whole, or under FSDP2 unit by unit; adapters, where they start, and
  those that a run continues), `grouped_adapters` (of layers that read one input), `nf4_experts` (in
  4 bits), `language_model` (of an image-text class), `vision` (its whole class, for rows with
  images), `vision_parts` (those that train), `streamed_base` (blocks in RAM),
  `attention_functions`, `tensor_parallel`, `fused_head` (of TRL).
- `loop/`: `trainer` (TRL's), `loop`, `evaluated_loop` (its evaluation), `loop_checkpoints`,
  `upstream` (private names of the libraries, guarded), `rows` (to micro-batches), `optimizers`,
  `callbacks`, `out_of_memory` (steps that run out of it), `curriculum` (stages).
- `checkpoints/`, and the final weights: `checkpoints` (whole or absent), `last_checkpoint` (also
  consolidated),
  `full_state_dict`, `sharded_checkpoints`, `model_saving`, `card`.
- `measure/`: `monitor`, `updates`, `profile`, `board`, `exact_match`,
  `summary`.

Unsloth trains in processes of its own: `unsloth_run` on both sides; `unsloth_worker` is their
program.
"""
