"""Stores the weights of a GGUF in fewer bits, by llama.cpp's own `llama_model_quantize`.

A program of its own (`python run_quantizer.py FROM TO QUANT`), which imports llama-cpp-python and nothing of the
toolkit: llama.cpp ends its process where it meets what it cannot do.
"""

from __future__ import annotations

import ctypes
import sys

del sys.path[0]  # the folder of this file, which has a llama_cpp of its own
import llama_cpp  # noqa: E402


def main(source: str, target: str, quant: str) -> int:
    """The exit code: 0, or what llama.cpp returned; 2 where this version of it does not know the type."""
    ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{quant.upper()}", None)
    if ftype is None:
        sys.stdout.write(f"llama-cpp-python {llama_cpp.__version__} does not know {quant}\n")
        return 2
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftype
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
