"""The machine: its GPUs, or those of a machine that is only named; its host, network and packages.
No torch.

`hardware` is the result, of GPUs that are a `gpu.Gpu` each. They are named, by a grammar of its
own, or found (`visible_gpus`, by `nvml`), with rates from `gpu_catalog`; `host` and `network` are
the rest of the machine, `software` its packages, `compiler` whether a kernel can be built,
and `host_speed` how fast its host was measured to start kernels.
Tables are JSON files beside their modules.
"""
