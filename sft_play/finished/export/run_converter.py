"""Runs llama.cpp's converter with what this toolkit knows better than the converter can guess.

A program of its own (`python run_converter.py CONVERTER_FOLDER ARGUMENTS…`), which imports nothing of the toolkit.
`SFT_PLAY_GGUF_VOCABULARY` is JSON: `pre`, the pre-tokenizer where the converter knows none for this tokenizer;
`add_bos`, whether prompts of training began with it; `ids`, special tokens by llama.cpp's names (eos, eot, eom);
`space_prefix`, whether SentencePiece puts a space before text (null: another kind of tokenizer).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def set_pre_tokenizer(owner: Any, pre_tokenizer: str | None) -> None:
    """Patch a converter class: if it does not know the pre-tokenizer, it takes the one that was proven equal."""
    original = owner.get_vocab_base_pre

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        try:
            return str(original(self, tokenizer))
        except NotImplementedError:
            if pre_tokenizer is None:
                raise
            return pre_tokenizer

    owner.get_vocab_base_pre = get_vocab_base_pre


def set_special_tokens(vocabulary: Any, add_bos: bool | None, ids: dict[str, int]) -> None:
    """Patch SpecialVocab: write training's stop tokens, and add nothing around a prompt that training did not add."""
    write = vocabulary.add_to_gguf

    def add_to_gguf(self: Any, *args: Any, **kwargs: Any) -> None:
        self.special_token_ids.update(ids)
        if add_bos is not None:
            self.add_special_token.update({"bos": add_bos, "eos": False})
        write(self, *args, **kwargs)

    vocabulary.add_to_gguf = add_to_gguf


def set_space_prefix(writer: Any, vocabulary: Any, adds_space_prefix: bool) -> None:
    """Patch the writer: always write how text begins, whatever the converter thinks of this architecture, since
    llama.cpp puts a space before text if the entry is missing."""
    write, write_special = writer.add_add_space_prefix, vocabulary.add_to_gguf
    written_writers: list[Any] = []

    def add_add_space_prefix(self: Any, value: bool) -> None:
        if self not in written_writers:  # a key that is written twice is an error
            written_writers.append(self)
            write(self, adds_space_prefix)

    def add_to_gguf(self: Any, gguf_writer: Any, *args: Any, **kwargs: Any) -> None:
        gguf_writer.add_add_space_prefix(adds_space_prefix)
        write_special(self, gguf_writer, *args, **kwargs)

    writer.add_add_space_prefix, vocabulary.add_to_gguf = add_add_space_prefix, add_to_gguf


def main() -> None:
    """Convert; the converter's own arguments follow its folder."""
    folder = Path(sys.argv.pop(1))
    vocabulary = json.loads(os.environ["SFT_PLAY_GGUF_VOCABULARY"])
    own_folder = str(Path(__file__).parent)  # whose modules have names such as `run` and `merge`
    sys.path[:] = [str(folder), str(folder / "gguf-py"), *(path for path in sys.path if path != own_folder)]
    sys.argv[0] = str(folder / "convert_hf_to_gguf.py")
    import convert_hf_to_gguf as converter  # type: ignore[import-not-found]
    import gguf

    owners = {
        candidate
        for module in [*sys.modules.values()]
        for candidate in vars(module).values()
        if isinstance(candidate, type) and "get_vocab_base_pre" in vars(candidate)
    }
    for owner in owners:
        set_pre_tokenizer(owner, vocabulary["pre"])
    set_special_tokens(gguf.SpecialVocab, vocabulary["add_bos"], vocabulary["ids"])
    if vocabulary["space_prefix"] is not None:
        set_space_prefix(gguf.GGUFWriter, gguf.SpecialVocab, vocabulary["space_prefix"])
    converter.main()


if __name__ == "__main__":
    main()
