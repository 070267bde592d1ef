"""What `make export` wrote: the formats, the files, and what serves them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sft_play.finished.run import Outcome, next_line
from sft_play.units import gib

Format = Literal["gguf", "ollama", "vllm"]
Quant = Literal[
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0",
    "iq4_nl", "iq4_xs", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
]  # fmt: skip
"""How a GGUF stores weights, the coarsest last: those that need no importance matrix."""
CONVERTED: tuple[Quant, ...] = ("f32", "f16", "bf16", "q8_0")
"""Those that the converter writes by itself."""
EXPORT = "export"
"""The folder in a run folder under which each format has its own."""
EXPORT_FILE = "export.json"
"""The file beside the export that says what it was made of; a folder without one is not replaced."""


@dataclass(frozen=True)
class Exported(Outcome):
    """What `export_run` wrote; `file`, `quant`, `converter`, `pre_tokenizer` and `prompts_checked` are of a GGUF."""

    run: Path
    format: Format
    path: Path
    bytes: int
    commands: tuple[str, ...]
    """What serves it."""
    notes: tuple[str, ...] = ()
    file: Path | None = None
    quant: Quant | None = None
    converter: str | None = None
    pre_tokenizer: str | None = None
    prompts_checked: int = 0
    """Prompts whose token ids by the file's own tokenizer were seen to be those of training."""
    merge: str | None = None
    """Of an adapter: what was merged, and whether merge-test passed, in words."""
    wall_s: float = 0.0

    def lines(self) -> list[str]:
        """In words."""
        lines = [*([self.merge] if self.merge else []), *self.notes]
        if self.file is not None:
            lines.append(
                f"Tokenizer: {self.pre_tokenizer}; its ids of {self.prompts_checked} prompts are those of training"
                if self.prompts_checked else "Tokenizer: not compared"
            )  # fmt: skip
        what = f"{self.quant}, " if self.quant else ""
        size = f"{what}{gib(self.bytes, digits=2)} GiB"
        lines.append(f"Written to: {self.file or self.path} ({size}, {self.wall_s:.0f} s)")
        lines += [f"Serve: {command}" for command in self.commands]
        elsewhere = {} if self.path == self.run / EXPORT / self.format else {"OUT": self.path}
        if self.file is not None:
            return [*lines, next_line("export-test", RUN=self.run, **elsewhere)]
        if self.merge is not None:
            return [*lines, next_line("merge-test", RUN=self.run)]
        return [*lines, next_line("push", "REPO=user/name", RUN=self.run)]


def shell_word(name: str | Path) -> str:
    """As a shell reads it as one word."""
    return shlex.quote(str(name))
