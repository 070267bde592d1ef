"""The model for others: merged, as GGUF, for Ollama and vLLM, on the hub; each compared with the
adapter.

- `merge` writes the merged weights, and `check_merge` compares them with the adapter.
- `export` writes a GGUF by `llama_cpp` (which runs `run_llama_cpp` as a program), an Ollama file by
  `ollama`, or the folder that vLLM serves. `check_export` compares a GGUF with the run, by its
  tokenizer and its answers, on the run's prompts.
- `push` uploads. `places` says where all of these are.
"""
