"""The tokenizer of a run: loaded, with a pad token and a chat template; every choice is
reported."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.errors import TokenizerError
from sft_play.log import one_line
from sft_play.models.config_json import find_model_folder
from sft_play.process.waiting import importing

# Templates by name for models without one: chatml needs its two tokens, plain only an end-of-text
# token.
BUILT_IN_TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' +"
        " message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{"
        " '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ 'Assistant: ' +"
        " message['content'] + eos_token + '\n' }}{% else %}{{ message['role'] | capitalize + ': '"
        " + message['content'] + '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{"
        " 'Assistant: ' }}{% endif %}"
    ),
}

# Tokens that a built-in template needs in the vocabulary.
TEMPLATE_TOKENS = {"chatml": ("<|im_start|>", "<|im_end|>"), "plain": ()}

# Tokens of real vocabularies that may pad, in the order in which they are tried; eos is the last
# resort.
PAD_TOKENS = (
    "<|pad|>",
    "<pad>",
    "[PAD]",
    "<|finetune_right_pad_id|>",
    "<|vision_pad|>",
    "<|endoftext|>",
    "<unk>",
)

# A folder with a tokenizer has at least one of these files.
_TOKENIZER_FILES = (
    "merges.txt",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)

# The name in data.chat_template for TRL's training variant of the tokenizer's own template.
TRAINING_TEMPLATE = "training"


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer ready to train with; `notes` say what was chosen, `sha256` identifies it,
    `original_template` is the chat template to save with the weights where the run uses a training
    variant of it."""

    tokenizer: Any
    notes: tuple[str, ...]
    sha256: str
    original_template: str | None = None
    # The tokens of `model.add_tokens` by their ids, and the pieces that each was split into before.
    new_rows: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def load_tokenizer(config: RunConfig) -> LoadedTokenizer:
    """The tokenizer of the run's model, with a pad token and, for chats, a chat template. Raises
    TokenizerError: it cannot be loaded, has a token that should be added, or has no template for
    chats."""
    model = config.model
    folder = find_model_folder(model.name)
    if folder is not None and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise TokenizerError(
            f"{folder} holds no tokenizer (looked for {', '.join(_TOKENIZER_FILES)})"
        )
    with importing():
        from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder) if folder else model.name,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
        )
    except Exception as error:  # a damaged file raises almost anything
        raise TokenizerError(
            f"the tokenizer of {model.name} cannot be loaded: {one_line(str(error), limit=300)}"
        ) from error
    new_rows = _add_tokens(tokenizer, config)
    original_template = (
        tokenizer.chat_template if config.data.chat_template == TRAINING_TEMPLATE else None
    )
    added_notes = (
        [f"Tokens: {len(new_rows)} added, {min(new_rows)} to {max(new_rows)}"] if new_rows else []
    )
    notes = [*added_notes, *_set_pad_token(tokenizer), *_set_template(tokenizer, config)]
    # for training, and saved with the weights; generated answers are padded on the left by hand
    # (`exact_match`)
    tokenizer.padding_side = "right"
    # of what determines a text's tokens: the tokenizer's own state and its chat template
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = backend.to_str() if backend is not None else str(sorted(tokenizer.get_vocab().items()))
    digest = hashlib.sha256(f"{state}\0{tokenizer.chat_template}".encode()).hexdigest()
    return LoadedTokenizer(tokenizer, tuple(notes), digest, original_template, new_rows)


def _add_tokens(tokenizer: Any, config: RunConfig) -> dict[int, tuple[int, ...]]:
    # ids with the pieces of each before; no special tokens: a text that spells one has it
    tokens, vocabulary = config.model.add_tokens, tokenizer.get_vocab()
    if not tokens:
        return {}
    pieces = [tuple(tokenizer(token, add_special_tokens=False)["input_ids"]) for token in tokens]
    problems = [
        f"{one_line(token)} is listed twice"
        for token in sorted(set(tokens))
        if tokens.count(token) > 1
    ]
    for token, ids in zip(tokens, pieces, strict=True):
        if token in vocabulary or (len(ids) == 1 and ids[0] != tokenizer.unk_token_id):
            problems.append(
                f"{one_line(token)} is one token already (id"
                f" {ids[0] if ids else vocabulary[token]})"
            )
        elif not ids:
            problems.append(f"{one_line(repr(token))} is no text to the tokenizer")
    if problems:
        raise TokenizerError(
            f"model.add_tokens: {'; '.join(problems)}; list only tokens that are new to it"
        )
    from transformers import AddedToken

    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    new_ids = list(added_token_rows(tokenizer, config))
    for token, token_id in zip(tokens, new_ids, strict=True):
        if tokenizer.decode([token_id]) != token:
            raise TokenizerError(
                "model.add_tokens: the tokenizer of"
                f" {config.model.name} cannot take {one_line(token)}"
            )
    return dict(zip(new_ids, pieces, strict=True))


def added_token_rows(tokenizer: Any, config: RunConfig) -> dict[int, tuple[int, ...]]:
    """The ids of `model.add_tokens` in a tokenizer that has them; what they began as is not
    known."""
    return dict.fromkeys(tokenizer.convert_tokens_to_ids(list(config.model.add_tokens)), ())


def _set_pad_token(tokenizer: Any) -> list[str]:
    # padding is masked by length, never by id, so eos may pad too
    if tokenizer.pad_token is not None:
        if tokenizer.pad_token_id == tokenizer.eos_token_id:
            return [
                f"Pad token: {tokenizer.pad_token}, which is also"
                " the end token; padding is masked by length"
            ]
        return []
    vocabulary = tokenizer.get_vocab()
    pad_token = next((token for token in PAD_TOKENS if token in vocabulary), tokenizer.eos_token)
    if pad_token is None:
        raise TokenizerError(
            "the tokenizer has neither a pad nor an eos token; set one in its tokenizer_config.json"
        )
    tokenizer.pad_token = pad_token
    return [
        f"Pad token: the tokenizer has none; {pad_token} pads"
        " (masked by length, so it is still learned elsewhere)"
    ]


def _set_template(tokenizer: Any, config: RunConfig) -> list[str]:
    template, vocabulary = config.data.chat_template, tokenizer.get_vocab()
    lacking = {
        name: [token for token in tokens if token not in vocabulary]
        for name, tokens in TEMPLATE_TOKENS.items()
    }
    if template is None:
        if config.task_mode == "cpt" or tokenizer.chat_template is not None:
            return []
        # without eos neither template fits: no answer would have an end
        fitting = [
            name for name in lacking if not lacking[name] and tokenizer.eos_token is not None
        ]
        raise TokenizerError(
            f"the tokenizer of {config.model.name} has no chat template; give data.chat_template a"
            f" Jinja file or a built-in name that fits this vocabulary ({', '.join(fitting)}), or"
            " train plain text with task_mode=cpt"
        )
    if template == TRAINING_TEMPLATE:
        from trl.chat_template_utils import get_training_chat_template

        own_template = tokenizer.chat_template
        if own_template is None:
            raise TokenizerError(
                "data.chat_template=training: the tokenizer has no template of its own"
            )
        try:
            variant = get_training_chat_template(tokenizer)
        except ValueError:
            raise TokenizerError(
                "data.chat_template=training: TRL has no training variant of this tokenizer's chat"
                " template; give data.chat_template a Jinja file, or see docs/masks.md for what to"
                " do with an inexact one"
            ) from None
        if variant in (None, own_template):  # None: the template needs none
            return ["Chat template: the tokenizer's own, which needs no training variant"]
        tokenizer.chat_template = str(variant)
        return [
            "Chat template: TRL's training variant of the"
            " tokenizer's own, which is saved with the weights"
        ]
    path = Path(template).expanduser()
    if path.is_file():
        try:
            tokenizer.chat_template = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise TokenizerError(f"data.chat_template={path} is not UTF-8 text") from None
        return [f"Chat template: {path}"]
    if template not in BUILT_IN_TEMPLATES:
        raise TokenizerError(
            f"data.chat_template={one_line(template)} is neither a file (looked from {Path.cwd()})"
            f" nor a built-in name ({', '.join(BUILT_IN_TEMPLATES)})"
        )
    if lacking[template]:
        raise TokenizerError(
            f"data.chat_template={template} needs {' and '.join(lacking[template])} in the "
            "vocabulary; use data.chat_template=plain or a Jinja file"
        )
    tokenizer.chat_template = BUILT_IN_TEMPLATES[template]
    return [f"Chat template: the built-in {template}"]
