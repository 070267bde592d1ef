"""What rendering and masks need of a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sft_play.errors import TokenizerError

END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>")
"""Tokens that end a document; chat models often have another one, their end of turn, as `eos_token`."""


@dataclass(frozen=True)
class TokenizerParts:
    """What rendering needs of a tokenizer: small enough to be sent to another process, where transformers stays out."""

    state: str
    """The backend as `tokenizers` writes it."""
    templates: tuple[tuple[str, str], ...]
    """Chat templates by name; one tokenizer may have a `default` and a `tool_use` one."""
    special_map: tuple[tuple[str, str], ...]
    special: tuple[str, ...]
    added: tuple[tuple[int, str, bool], ...]
    """Added tokens: id, text, and whether they are special."""
    bos_id: int | None
    eos: str | None
    end_of_text: int | None
    live: Any = field(default=None, repr=False, compare=False)
    """The backend itself, where it is in this process: parsing `state` again takes time and memory."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "live": None}  # the other process reads `state`

    @classmethod
    def of(cls, tokenizer: Any) -> TokenizerParts:
        """The parts of a transformers tokenizer.

        Raises:
            TokenizerError: it cannot say which characters a token stands for.
        """
        if isinstance(tokenizer, cls):
            return tokenizer
        if not tokenizer.is_fast:
            raise TokenizerError(
                f"the tokenizer is {type(tokenizer).__name__}, which cannot say which characters a token stands for; "
                "a loss mask needs a fast one (a tokenizer.json in the model's folder)"
            )
        # transformers: one template as a text, or several as {name: text}
        given = tokenizer.chat_template
        templates = given if isinstance(given, dict) else {"default": given} if given else {}
        special_map = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
        added = tokenizer.added_tokens_decoder.items()
        return cls(
            tokenizer.backend_tokenizer.to_str(),
            tuple(templates.items()),
            tuple(special_map.items()),
            tuple(tokenizer.all_special_tokens),
            tuple((number, str(token.content), bool(token.special)) for number, token in added),
            tokenizer.bos_token_id,
            tokenizer.eos_token,
            end_of_text_id(tokenizer),
            _with_shared_vocabulary(tokenizer.backend_tokenizer),
        )

    def template(self, *, with_tools: bool) -> str:
        """The template of rows with tools or without, as transformers chooses it; raises TokenizerError where there
        is none."""
        named = dict(self.templates)
        source = named.get("tool_use") if with_tools else None
        source = source or named.get("default")
        if source is None and named:
            raise TokenizerError(
                f"the tokenizer has no chat template for rows {'with' if with_tools else 'without'} tools, only "
                f"{', '.join(sorted(named))}; set data.chat_template"
            )
        if source is None:
            raise TokenizerError("the tokenizer has no chat template; set data.chat_template")
        return source

    @property
    def writes_date(self) -> bool:
        """Whether a chat template writes the day."""
        return any("strftime_now" in source for _, source in self.templates)

    def with_template(self, source: str) -> TokenizerParts:
        """The same tokenizer with another template."""
        return replace(self, templates=(("default", source),))


def _with_shared_vocabulary(backend: Any) -> Any:
    """A second tokenizer of the same parts, whose padding and truncation are its own; None where it would differ."""
    from tokenizers import Tokenizer

    # the vocabulary is shared: parsing it again from JSON would cost time and memory
    copy = Tokenizer(backend.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(backend, name)) is not None:
            setattr(copy, name, part)
    added = backend.get_added_tokens_decoder()
    # by id: a token whose text is not in the vocabulary gets the next free id
    copy.add_tokens([token for _, token in sorted(added.items())])
    copy.encode_special_tokens = backend.encode_special_tokens
    is_same = copy.get_added_tokens_decoder() == added and copy.get_vocab_size() == backend.get_vocab_size()
    return copy if is_same else None


def end_of_text_id(tokenizer: Any) -> int | None:
    """The token between documents: an end-of-text token of the vocabulary, else the tokenizer's eos."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    eos: int | None = tokenizer.eos_token_id
    return next((vocabulary[token] for token in END_OF_TEXT_TOKENS if token in vocabulary), eos)
