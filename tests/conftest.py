"""What several test files share: tiny models made once, the shared material where it is, commands in-process."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_play.environment import OF_MAKE, waiting_threads

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background with Ctrl-C ignored, which every process of a test would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup what it runs with SIGHUP ignored
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes share the cores
os.environ.update(waiting_threads(os.environ))  # commands run in this process, which loads torch before them
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def shared(name: str) -> Path:
    """A file of the shared material, or a skip that says so."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the shared material is not here: {path}")
    return path


LONGEST_FIRST = ("test_starter", "test_distributed", "test_failures", "test_trace", "test_endings", "test_going_on")
"""Files that take minutes: first, so that no process is left with one when the other has nothing to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


VARIABLES = (
    *(name for name in OF_MAKE if name not in ("TESTS", "TORCH")),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE"),
    *("SFT_PLAY_RUN", "SFT_PLAY_AGENT", "SFT_PLAY_PARENT", "SFT_PLAY_MAKE", "TORCHELASTIC_ERROR_FILE"),
    "GLOO_SOCKET_IFNAME",
)
"""Variables of make and of launchers, which a test sets for itself."""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave the user's caches alone: neither base model, record of runs nor accelerate's answers are theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFT_PLAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("huggingface")))
        yield


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer Llama of random weights and its tokenizer."""
    from tests.models import make_llama

    return make_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 chats about sums, as JSONL."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(json.dumps(chat(f"what is {n} + {n}?", f"it is {2 * n}.")) + "\n" for n in range(64)))
    return path


def chat(question: str, answer: str) -> dict[str, object]:
    """A row of one question and one answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command line in this process: (exit code, everything it printed)."""
    from sft_play.cli import main

    def run(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main(list(words))
        out, err = capfd.readouterr()
        return code, out + err

    return run


def digest(value: Any) -> str:
    """Sixteen characters that stand for a value; floats by six digits, which no processor rounds otherwise."""
    plain = json.loads(json.dumps(value, default=str), parse_float=lambda text: f"{float(text):.6g}")
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
