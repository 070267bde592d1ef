"""The name of a run folder, and the folder that it is created in."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path

from sft_play.config.schema import OutputConfig
from sft_play.errors import RunFolderError
from sft_play.log import one_line


def output_dir(output: OutputConfig) -> Path:
    """The folder of the run folders; raises RunFolderError where it cannot be a folder."""
    try:
        base = Path(output.dir).expanduser()
        is_file = base.exists() and not base.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise RunFolderError(f"output.dir={one_line(output.dir)} cannot be a folder: {error}") from None
    if is_file:
        raise RunFolderError(f"output.dir={one_line(str(base))} is a file; name a folder")
    return base


def run_name(output: OutputConfig, *, config_path: Path, now: datetime) -> str:
    """The folder's name: as given, or the config's stem with the UTC time.

    Raises:
        RunFolderError: the name could leave `output.dir`.
    """
    if output.name is None:
        stem = re.sub(r"[^\w.-]+", "-", config_path.stem).strip(".-") or "run"
        return f"{stem}-{now.strftime('%Y%m%dT%H%M%SZ')}"
    return checked_name(output.name, key="output.name")


def checked_name(name: str, *, key: str) -> str:
    """The name, if it can only mean a folder directly below `output.dir`; raises RunFolderError otherwise."""
    # "-" would read as a flag where the name is typed, ":" as a drive; 200 bytes leave room for ".replaced-TIME".
    bad = name != name.strip() or name.startswith((".", "~", "-")) or re.search(r"[/\\\x00-\x1f:]", name)
    if bad or ".." in name or not name or len(name.encode()) > 200:
        raise RunFolderError(
            f"{key}={one_line(json.dumps(name, ensure_ascii=False))} is refused: a run's name is one word "
            "without separators, `..` or a leading dot, such as output.name=gsm8k-r16"
        )
    return name
