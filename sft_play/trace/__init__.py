"""The plan's second opinion: the real step on fake tensors, replayed through a simulated CUDA caching allocator."""
