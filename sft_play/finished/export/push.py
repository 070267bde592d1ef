"""`make push`: a run's weights on the Hugging Face hub, with their model card; never data, logs or
checkpoints.

Only files that belong to a model are uploaded. In those of text the base is named as others find
it, and one that still names a local path or holds a secret is refused.
"""

import contextlib
import fnmatch
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from sft_play.answers import Answer
from sft_play.errors import ConfigError, RunFolderError
from sft_play.finished.run import (
    MERGED_FOLDER,
    FinishedRun,
    describe_merge,
    find_merged_model,
    next_command_line,
    require_faithful_merge,
)
from sft_play.log import one_line, redact
from sft_play.runs.folder import read_json
from sft_play.text import format_size

# Names of files that belong to a model.
UPLOAD_PATTERNS = (
    "*.safetensors", "*.safetensors.index.json", "adapter_config.json", "config.json",
    "generation_config.json", "merge.json", "README.md", "LICENSE*", "NOTICE*", "*.jinja",
    "additional_chat_templates/*.jinja", "*.py", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.model", "*.tiktoken", "tekken.json", "bpe.codes", "dict.txt", "*.spm",
    "emoji.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.yaml",
)  # fmt: skip
# Files whose text is searched for paths and secrets; vocabularies hold words of every kind.
_LEAK_CHECKED_PATTERNS = ("README.md", "*config*.json", "*.jinja", "*.py", "*.index.json")


@dataclass(frozen=True)
class Upload(Answer):
    """An upload, planned or done. `files` has a path, or the content that is uploaded in its place,
    by name in the repository. `repo_exists` is True if the repository was there before,
    `is_private` if it is private or will be made so; `commit` is empty before the upload."""

    run: Path
    folder: Path
    repo: str
    files: dict[str, Path | bytes]
    repo_exists: bool
    is_private: bool
    notes: tuple[str, ...]
    commit: str = ""

    def _file_sizes(self) -> dict[str, int]:
        return {
            name: len(file) if isinstance(file, bytes) else file.stat().st_size
            for name, file in self.files.items()
        }

    def describe(self) -> str:
        """Repository, files and sizes, as they are shown before the upload."""
        access, sizes = "private" if self.is_private else "PUBLIC", self._file_sizes()
        action = (
            f"the existing {access} repository is updated"
            if self.repo_exists
            else f"a new {access} repository"
        )
        files = [f"  {name} ({format_size(size)})" for name, size in sizes.items()]
        header = (
            f"From {self.folder} to https://huggingface.co/{self.repo} ({action}),"
            f" {format_size(sum(sizes.values()))}:"
        )
        return "\n".join([header, *files, *self.notes])

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": True,
            "pushed": True,
            "run": str(self.run),
            "repo": self.repo,
            "url": f"https://huggingface.co/{self.repo}",
            "commit": self.commit,
            "private": self.is_private,
            "created": not self.repo_exists,
            "files": [{"name": name, "bytes": size} for name, size in self._file_sizes().items()],
        }

    def lines(self) -> list[str]:
        access = "private" if self.is_private else "public"
        return [
            f"Uploaded: {len(self.files)} files to https://huggingface.co/{self.repo} ({access})",
            next_command_line(
                "prune", "CHECKPOINTS=1 frees the disk of its checkpoints", RUNS=self.run.name
            ),
        ]


def plan_upload(
    run: FinishedRun, repo: str, *, is_merged: bool, is_public: bool, is_confirmed: bool
) -> Upload:
    """Plan an upload; nothing is written, here or on the hub.

    Args:
        is_merged: True uploads the merged model in place of the adapter.
        is_public: True makes a new repository public.
        is_confirmed: True if nobody is asked: then only `is_public` allows the update of an
            existing public repository.

    Raises:
        ConfigError: there is no token, the hub refuses, or a file names a path of this machine.
        RunFolderError: there is no merged model.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    folder = _merged_folder(run) if is_merged else run.weights
    if get_token() is None:
        raise ConfigError(
            "there is no token of the Hugging Face hub here: hf auth login, or HF_TOKEN=…"
        )
    # after what is refused without torch, which this imports
    from sft_play.training.checkpoints.card import CARD_FILE, REPOSITORY_PLACEHOLDER, describe_base

    is_private_repo = None  # where it does not exist
    with (
        _translate_hub_errors("the hub cannot be asked"),
        contextlib.suppress(RepositoryNotFoundError),
    ):
        HfApi().whoami()
        is_private_repo = bool(HfApi().model_info(repo).private)
    if is_private_repo is False and is_confirmed and not is_public:
        raise ConfigError(
            f"{repo} exists and is public; YES=1 does not ask, so PUBLIC=1 has to confirm it"
        )
    notes = [line for line in [describe_merge(folder)] if is_merged and line]
    files: dict[str, Path | bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        # as a path: `*` stays within a folder
        if path.is_file() and any(
            PurePosixPath(f"/{name}").match(f"/{pattern}") for pattern in UPLOAD_PATTERNS
        ):
            files[name] = path
    if CARD_FILE in files:
        card = (folder / CARD_FILE).read_bytes()
        files[CARD_FILE] = card.replace(REPOSITORY_PLACEHOLDER.encode(), repo.encode())
    if "adapter_config.json" in files:
        # by the name that others find it under: a local path means nothing to them
        base = describe_base(run.config)
        settings = read_json(folder / "adapter_config.json") | {
            "base_model_name_or_path": base.name
        }
        files["adapter_config.json"] = (
            json.dumps(settings, indent=2, sort_keys=True) + "\n"
        ).encode()
        if not base.is_on_hub:
            notes.append(
                f"Its base, {base.name}, is a local model, which others need too;"
                " MERGED=1 needs none"
            )
    _refuse_leaks(run, files)
    if is_private_repo and is_public:
        notes.append(f"{repo} is private and stays so; its settings on the hub change that")
    return Upload(
        run.folder.path,
        folder,
        repo,
        files,
        repo_exists=is_private_repo is not None,
        is_private=not is_public if is_private_repo is None else is_private_repo,
        notes=tuple(notes),
    )


def push(upload: Upload) -> Upload:
    """Upload in one commit, so that the repository has all files or none. Raises ConfigError where
    the hub refuses it."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    with _translate_hub_errors(f"{upload.repo} cannot be written"):
        if not upload.repo_exists:
            # exist_ok=False: one that appeared since the user agreed may be public, or somebody
            # else's
            api.create_repo(upload.repo, private=upload.is_private, exist_ok=False)
        operations = [CommitOperationAdd(name, file) for name, file in upload.files.items()]
        commit = api.create_commit(
            upload.repo, operations, commit_message=f"Upload {upload.run.name}"
        )
    return replace(upload, commit=str(commit.oid))


def require_repo_name(repo: str | None) -> str:
    """Check the name of a repository; raises ConfigError where there is none, or it cannot be
    one."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if not repo or "/" not in repo:
        raise ConfigError(
            f"REPO={one_line(repo or '')} names no user and repository of the hub,"
            " such as REPO=user/name"
        )
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(
            f"REPO={one_line(repo)} names no repository: {one_line(str(error), limit=200)}"
        ) from None
    return repo


def _merged_folder(run: FinishedRun) -> Path:
    if not run.is_adapter:
        raise RunFolderError(
            f"{run.folder.path} trained all weights: there is no merged model; leave MERGED=1 out"
        )
    merged = find_merged_model(run)
    if merged is None:
        raise RunFolderError(
            f"{run.folder.path / MERGED_FOLDER} holds no merged model of this adapter; "
            f"make merge RUN={run.folder.shell_path} FORCE=1 writes it"
        )
    require_faithful_merge(merged, run)
    return merged


@contextlib.contextmanager
def _translate_hub_errors(problem: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the hub's own errors, and those of every layer below it
        raise ConfigError(f"{problem}: {one_line(redact(str(error)), limit=300)}") from error


def _refuse_leaks(run: FinishedRun, files: dict[str, Path | bytes]) -> None:
    data_paths = [
        Path(str(file.get("path", ""))) for file in (run.manifest.get("data") or {}).values()
    ]
    folders = {
        str(path.parent) for path in (run.folder.path.absolute(), *data_paths) if path.is_absolute()
    }
    # a folder such as /data may be named by any text; one below it is this machine's
    private_paths = sorted(
        folder for folder in {*folders, str(Path.cwd()), str(Path.home())} if folder.count("/") > 1
    )
    for name, file in files.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _LEAK_CHECKED_PATTERNS):
            continue
        text = (file if isinstance(file, bytes) else file.read_bytes()).decode("utf-8", "replace")
        for path in private_paths:
            if path in text:
                raise ConfigError(
                    f"{name} names a path of this machine, {one_line(path)};"
                    " remove it there before the upload"
                )
        if redact(text) != text:
            raise ConfigError(
                f"{name} holds what looks like a password or a token; take it out first"
            )
