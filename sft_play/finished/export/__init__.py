"""The model for others: merged, as GGUF, for Ollama and vLLM, on the hub; each compared with the adapter."""
