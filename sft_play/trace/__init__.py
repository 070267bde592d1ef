"""The plan's second opinion: the real step on fake tensors, replayed through a simulated CUDA
caching allocator.

`confirm` turns a plan's candidate into `settings`, or answers from the cache. `step` runs it, alone
or as one of several ranks: `build` makes the model, with stand-ins for what needs a GPU, `patches`
puts others into the libraries, and `kernels` adds what CUDA's kernels allocate. `storages` logs
every allocation, and plays the log through the allocator.

Rows with images add a vision tower, which `vision` measures by itself.

`pass_work` counts what blocks move and start beside their products, for the plan's speed;
`host_probe` is a program that measures how fast the host starts kernels.

For models that the table of families does not know `meta_shape` measures their shapes, and a step
of a few blocks what those need, where load_run_model_shape, by which every plan gets its shape,
asks for it.
"""
