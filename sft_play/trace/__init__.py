"""The plan's second opinion: the real step on fake tensors, replayed through a simulated CUDA caching
allocator.

`confirm` turns a plan's candidate into `settings`, or answers from the cache. `step` runs it:
`build` makes the model, `patches` puts stand-ins (some of them in `fakes`) where the libraries
would need a GPU, `kernels` adds what CUDA's kernels allocate, and `ranks` what DDP and FSDP do.
`storages` logs every allocation, and plays the log through the allocator.

Three are for models that the table of families does not know: `meta_shape` measures their shapes,
and `block_meter` what their blocks need, which `blocks` runs; it also has load_run_model_shape,
by which every plan gets its shape.
"""
