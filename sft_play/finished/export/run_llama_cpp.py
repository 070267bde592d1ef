"""Runs llama.cpp's converter, with what this toolkit knows better than it can guess, or its
quantizer.

A program of its own, which imports nothing of the toolkit: llama.cpp ends its process where it
meets what it cannot do.

    python run_llama_cpp.py convert CONVERTER_FOLDER ARGUMENTS…
    python run_llama_cpp.py quantize FROM TO QUANT

`SFT_PLAY_GGUF_VOCABULARY` is JSON for the converter: `pre`, the pre-tokenizer where it knows none
for this tokenizer; `fields`, entries of the file (numbers, true or false) that are written as they
are here, whatever the converter thinks of this architecture.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any


def convert(folder: str) -> None:
    """Convert; the converter's own arguments are in `sys.argv`."""
    vocabulary = json.loads(os.environ["SFT_PLAY_GGUF_VOCABULARY"])
    sys.path[:0] = [folder, str(Path(folder) / "gguf-py")]
    import convert_hf_to_gguf as converter  # type: ignore[import-not-found]
    import gguf

    # checkouts of 2025 have the class in the script itself
    text_model = (
        getattr(sys.modules.get("conversion.base"), "TextModel", None) or converter.TextModel
    )
    find_pre_tokenizer, write_header = (
        text_model.get_vocab_base_pre,
        gguf.GGUFWriter.write_header_to_file,
    )

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        try:
            return str(find_pre_tokenizer(self, tokenizer))
        except NotImplementedError:
            if vocabulary["pre"] is None:
                raise
            return str(vocabulary["pre"])

    def write_header_to_file(self: Any, *args: Any, **kwargs: Any) -> None:
        for key, value in vocabulary["fields"].items():
            for entries in self.kv_data:
                entries.pop(key, None)  # some versions take no key twice
            (self.add_bool if isinstance(value, bool) else self.add_uint32)(key, value)
        write_header(self, *args, **kwargs)

    text_model.get_vocab_base_pre = get_vocab_base_pre
    gguf.GGUFWriter.write_header_to_file = write_header_to_file
    converter.main()


def quantize(source: str, target: str, quant: str) -> int:
    """The exit code: 0, or what llama.cpp returned; 2 where this version of it does not know the
    type."""
    import llama_cpp

    ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{quant.upper()}", None)
    if ftype is None:
        sys.stdout.write(f"llama-cpp-python {llama_cpp.__version__} does not know {quant}\n")
        return 2
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftype
    return int(
        llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    )


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, which has modules such as `merge` and `llama_cpp`
    if sys.argv.pop(1) == "quantize":
        sys.exit(quantize(*sys.argv[1:]))
    convert(sys.argv.pop(1))
