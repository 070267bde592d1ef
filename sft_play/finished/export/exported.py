"""What `make export` wrote: the formats, the files, and what serves them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sft_play.finished.run import next_line
from sft_play.units import gib

Format = Literal["gguf", "ollama", "vllm"]
Quant = Literal["f32", "f16", "bf16", "q8_0"]
EXPORT = "export"
"""The folder in a run folder under which each format has its own."""
EXPORT_FILE = "export.json"
"""The file beside the export that says what it was made of; a folder without one is not replaced."""


@dataclass(frozen=True)
class WrittenExport:
    """What a format's own code wrote into the folder."""

    record: dict[str, str]
    """For `EXPORT_FILE`."""
    bytes: int
    commands: tuple[str, ...]
    """What serves it."""
    notes: tuple[str, ...] = ()
    file: Path | None = None
    """The GGUF, where the format has one; the four that follow concern it."""
    quant: Quant | None = None
    converter: str | None = None
    pre_tokenizer: str | None = None
    prompts: int = 0
    """Prompts whose token ids by the file's own tokenizer were seen to be those of training."""


@dataclass(frozen=True)
class Exported:
    """What `export_run` wrote."""

    run: Path
    format: Format
    path: Path
    written: WrittenExport
    is_adapter: bool
    """Whether the run's model had to be merged."""
    seconds: float
    merge: str | None = None
    """What was merged, and whether merge-test passed, in words."""

    ok = True

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        one = self.written
        return {
            "ok": True, "run": str(self.run), "format": self.format, "path": str(self.path),
            "file": str(one.file) if one.file else None, "quant": one.quant, "bytes": one.bytes,
            "converter": one.converter, "pre_tokenizer": one.pre_tokenizer, "prompts_checked": one.prompts,
            "commands": list(one.commands), "notes": list(one.notes), "merge": self.merge,
            "wall_s": round(self.seconds, 2),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """In words."""
        one = self.written
        lines = [*([self.merge] if self.merge else []), *one.notes]
        if one.file is not None:
            lines.append(
                f"Tokenizer: {one.pre_tokenizer}; its ids of {one.prompts} prompts are those of training"
                if one.prompts else "Tokenizer: not compared"
            )  # fmt: skip
        what = f"{one.quant}, " if one.quant else ""
        lines.append(
            f"Written to: {one.file or self.path} ({what}{gib(one.bytes, digits=2)} GiB, {self.seconds:.0f} s)"
        )
        lines += [f"Serve: {command}" for command in one.commands]
        elsewhere = {} if self.path == self.run / EXPORT / self.format else {"OUT": self.path}
        if one.file is not None:
            return [*lines, next_line("export-test", RUN=self.run, **elsewhere)]
        if self.is_adapter:
            return [*lines, next_line("merge-test", RUN=self.run)]
        return [*lines, next_line("push", "REPO=user/name", RUN=self.run)]


def shell_word(name: str | Path) -> str:
    """As a shell reads it as one word."""
    return shlex.quote(str(name))
