"""The model for others: merged, as GGUF, for Ollama and vLLM, on the hub; each compared with the
adapter.

- `merge` writes the merged weights, and `check_merge` compares them with the adapter.
- `export` writes a GGUF by `llama_cpp` (which runs `run_converter` and `run_quantizer` as
  programs), an Ollama file by `ollama`, or the folder that vLLM serves. `gguf_checks` and
  `engine_prompts` are what it is checked by; `check_export` compares its answers with the run's.
- `push` uploads. `places` says where all of these are.
"""
