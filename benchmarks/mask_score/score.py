"""How exact the loss masks are: every chat template of a folder, on eight kinds of conversation, judged independently.

The judge (`exact.py`) shares no code with what makes the masks: every message has words that stand nowhere else, and
the characters that are trained are held against what transformers renders of the case and of its variations.
"""

import copy
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.mask_score.exact import NOTHING_ENDS, JudgedMask, MaskCase, Renderings, find_mask_problem
from sft_play.answers import Answer
from sft_play.config.schema import DataConfig
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.tokenizer import TokenizerParts
from sft_play.data.sources.formats import Chat
from sft_play.data.sources.raw import BadRow
from sft_play.errors import ConfigError, TokenizerError
from sft_play.log import one_line

Verdict = Literal["exact", "refused", "wrong", "cannot_render"]
SUFFIXES = frozenset({".jinja", ".jinja2", ".j2"})
_NO_LIMIT = 1 << 30
_OPTIONS = DataConfig(on_missing_end="train")
"""The templates' ends need not be tokens of the one tokenizer that all of them are scored with."""


def _read_cases() -> Iterator[MaskCase]:
    """Conversations, each message with the words that it alone has; `optional` ones need not be written."""
    for case in json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8")):
        messages, words = zip(*case["said"], strict=True)
        needed = [word for own in words for word in own if word not in case["optional"]]
        yield MaskCase(case["name"], messages, tuple(map(tuple, words)), tuple(needed), tuple(case["tools"]))


CASES = tuple(_read_cases())


@dataclass(frozen=True)
class MaskScoreRow:
    """One template on one case."""

    template: str
    case: str
    method: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class MaskScore(Answer):
    """All templates on all cases; `ok` where no mask is wrong."""

    rows: tuple[MaskScoreRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.verdict != "wrong" for row in self.rows)

    def as_json(self) -> list[dict[str, str]]:
        return [dict(vars(row)) for row in self.rows]

    def counts(self) -> Counter[str]:
        return Counter(row.verdict for row in self.rows)

    def lines(self) -> list[str]:
        names = [case.name for case in CASES]
        lines = [f"| template | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
        for template, rows in itertools.groupby(self.rows, key=lambda row: row.template):
            words = {"refused": "refused", "cannot_render": "—", "wrong": "WRONG"}
            shown = " | ".join(words.get(row.verdict, row.method) for row in rows)
            lines.append(f"| {template} | {shown} |")
        counts = self.counts()
        renders = len(self.rows) - counts["cannot_render"]
        lines.append("")
        wrong = [row for row in self.rows if row.verdict == "wrong"]
        lines += [f"{row.template}, {row.case}: wrong: {row.reason}" for row in wrong]
        share = f"{counts['exact'] / renders:.1%}" if renders else "none"
        lines.append(
            f"{counts['exact']} of {renders} cases that render are exact ({share}), {counts['refused']} are refused, "
            f"{counts['wrong']} are wrong; {counts['cannot_render']} cannot be rendered"
        )
        return lines


def score(folder: Path, tokenizer: str) -> MaskScore:
    """The masks of every template below the folder, with this tokenizer (a folder or a hub id).
    Raises ConfigError or TokenizerError."""
    if folder.is_file():
        raise ConfigError(f"TEMPLATES={folder} is a file; give the folder that holds it: TEMPLATES={folder.parent}")
    if not folder.is_dir():
        raise ConfigError(f"TEMPLATES={folder} is not a folder (looked from {Path.cwd()})")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise ConfigError(f"TEMPLATES={folder} holds no templates; looked for {', '.join(sorted(SUFFIXES))}")
    loaded = _load(tokenizer)
    parts = TokenizerParts.from_tokenizer(loaded)
    return MaskScore(tuple(row for file in files for row in _score_template(file, folder, loaded, parts)))


def _load(name: str) -> Any:
    from transformers import AutoTokenizer

    folder = Path(name).expanduser()
    looks_local = name.startswith(("/", ".", "~")) or folder.exists()
    if not name.strip():
        raise TokenizerError("TOKENIZER is empty; give the folder or the hub id of a tokenizer")
    if looks_local and not folder.is_dir():
        raise TokenizerError(f"TOKENIZER={name} is not a folder (looked from {Path.cwd()})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if looks_local else name)
    except Exception as error:  # a damaged file fails in as many ways as there are tokenizers
        raise TokenizerError(f"TOKENIZER={name} cannot be loaded: {one_line(str(error), limit=300)}") from error
    return tokenizer


def _score_template(file: Path, folder: Path, tokenizer: Any, parts: TokenizerParts) -> Iterator[MaskScoreRow]:
    name = file.relative_to(folder).as_posix()
    try:
        own = copy.copy(tokenizer)
        own.chat_template = _read(file)
        renderer = Renderer(parts.replace_template(own.chat_template), _OPTIONS, max_seq_len=_NO_LIMIT)
        renderer.turn_locator()
    except TokenizerError as error:
        for case in CASES:
            yield MaskScoreRow(name, case.name, "", "cannot_render", one_line(str(error), limit=200))
        return
    for case in CASES:
        yield _judge_case(name, case, renderer, own)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise TokenizerError(f"the file is not UTF-8: byte 0x{byte:02X} at {error.start}") from error
    except OSError as error:
        raise TokenizerError(f"the file cannot be read: {error.strerror}") from error


def _judge_case(name: str, case: MaskCase, renderer: Renderer, tokenizer: Any) -> MaskScoreRow:
    renderings = Renderings(case, tokenizer, renderer.turn_locator().template.chat_template)
    found = renderer.render(Chat(f"{name}:{case.name}", case.messages, case.tools))
    if not renderings.written:
        return MaskScoreRow(name, case.name, "", "cannot_render", renderings.why)
    if isinstance(found, BadRow):
        reason = found.reason + (f" ({found.detail})" if found.detail else "")
        return MaskScoreRow(name, case.name, "", "refused", one_line(reason, limit=300))
    mask = JudgedMask(found.text, found.input_ids, found.labels, found.method == "last_turn")
    wrong = find_mask_problem(case, mask, renderings, tokenizer)
    if wrong == NOTHING_ENDS:
        reason = f"{wrong} (data.on_missing_end=train trains it all the same)"
        return MaskScoreRow(name, case.name, "", "refused", reason)
    if wrong:
        return MaskScoreRow(name, case.name, found.method, "wrong", wrong)
    left = f"{found.untrained_turns} earlier turns are not trained" if found.untrained_turns else ""
    return MaskScoreRow(name, case.name, found.method, "exact", left)
