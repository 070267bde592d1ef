"""The model for others: merged, as GGUF, for Ollama and vLLM, on the hub; each compared with the
adapter.

- `merge` writes the merged weights.
- `export` writes a GGUF by `llama_cpp` (which runs `run_llama_cpp` as a program), an Ollama file,
  or the folder that vLLM serves.
- `checks` compares the merged model with the adapter, and a GGUF with the run, by its tokenizer and
  its answers, on the run's prompts.
- `push` uploads.
"""
