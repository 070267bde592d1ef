"""What several test files share: tiny models made once, the shared material where it is, commands in-process."""

import gc
import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sft_play.process.environment import MAKE_COMMAND_VARIABLES, openmp_wait_variables

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("SFT_PLAY_SHARED") or ROOT.parent / "shared" / "data")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background with Ctrl-C ignored, which every process of a test would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup what it runs with SIGHUP ignored
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # three processes share the cores
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False  # a hundred processes of tests would each compile the package anew, for two seconds
os.environ.update(openmp_wait_variables(os.environ))  # commands run in this process, which loads torch before them
os.environ["WHY"] = "1"  # tests read everything that commands have to say; test_screens.py reads what a person sees
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def shared(name: str) -> Path:
    """A file of the shared material (`../shared/data`, or SFT_PLAY_SHARED), or a skip that says so."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the shared material is not here: {path}")
    return path


LONGEST_FIRST = (
    *("test_starter", "test_sharded_checkpoints", "test_failures", "test_compiling", "test_mesh", "test_distributed"),
    *("test_fsdp_loading", "test_makefile", "test_ways_in", "test_export", "test_commands", "test_stages"),
    *("test_train", "test_gradients", "test_trace", "test_tensorboard", "test_recorded_data", "test_plan_inputs"),
    *("test_options", "test_score", "test_endings", "test_mask_score", "test_eval", "test_going_on"),
)
"""Files that take minutes: first, so that no process is left with one when the other has nothing to do."""


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        from tests import warm

        warm.keep()


@pytest.hookimpl(tryfirst=True)  # before what is marked slow is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.slow_tests import listed

    left_out = listed()
    for item in items:
        if item.nodeid in left_out:
            item.add_marker(pytest.mark.slow)
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def chosen(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of a parameter in the tests of this file that are run: a fixture makes no more than they ask for."""
    specs = [getattr(one, "callspec", None) for one in request.session.items if one.path == request.path]
    values = [spec.params[name] for spec in specs if spec is not None and name in spec.params]
    return [value for place, value in enumerate(values) if value not in values[:place]]


_IMPORTS_OF_LIBRARIES = 300
_RUNS_PER_COLLECTION = 10
_frozen_modules = 0
_ended_runs = 0
unfreeze = gc.unfreeze


def _end_run() -> None:
    global _ended_runs
    _ended_runs += 1


gc.unfreeze = _end_run


def pytest_runtest_setup() -> None:
    """Leave what libraries made at import out of Python's garbage collections, of which every run makes several:
    each walks through a million objects that stay. At the end of a run `frozen_objects` would let them in again; here
    that happens after some runs, whose own garbage goes with it."""
    global _frozen_modules, _ended_runs
    if len(sys.modules) > _frozen_modules + _IMPORTS_OF_LIBRARIES or _ended_runs >= _RUNS_PER_COLLECTION:
        unfreeze()
        gc.collect()
        gc.freeze()
        _frozen_modules, _ended_runs = len(sys.modules), 0


VARIABLES = (
    *(name for name in MAKE_COMMAND_VARIABLES if name not in ("TESTS", "TORCH", "WHY")),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE"),
    *("SFT_PLAY_RUN", "SFT_PLAY_RESUMED", "SFT_PLAY_AGENT", "SFT_PLAY_PARENT", "SFT_PLAY_MAKE"),
    "TORCHELASTIC_ERROR_FILE",
    *("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"),  # of `make test TESTS=…`
    "GLOO_SOCKET_IFNAME", "PYTEST_ADDOPTS",
)  # fmt: skip
"""Variables of make and of launchers, which a test sets for itself."""


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment of a command that a test starts: nothing of make or a launcher, one thread a process."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # commands are named as in a checkout, wherever a test stands
    monkeypatch.setattr("sft_play.variables.is_makefile_near", lambda: True)


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


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A folder with a run of five steps, and in `site` the sitecustomize.py of its ranks: RANKS of the module."""
    from tests.models import uneven_run

    folder = tmp_path_factory.mktemp("world")
    uneven_run(folder, tiny_llama)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(request.module.RANKS)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of the tests' own words, with its default template."""
    from transformers import AutoTokenizer

    from tests.models import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 chats about sums, as JSONL."""
    rows = (chat(f"what is {n} + {n}?", f"it is {2 * n}.") for n in range(64))
    return write_rows(tmp_path_factory.mktemp("data") / "sums.jsonl", rows)


def chat(question: str, answer: str) -> dict[str, object]:
    """A row of one question and one answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    """Write rows as JSONL; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_run(folder: Path, model: Path, rows: Path, /, **sections: Mapping[str, Any]) -> Path:
    """Write `folder/run.yaml`: two steps of LoRA on all the rows, into `folder/outputs`; `sections` changes keys."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"name": str(model), "max_seq_len": 64}, "tuning": {"mode": "lora"},
        "data": {"train_path": str(rows), "val_path": None, "test_path": None},
        "train": {"effective_batch_size": 8, "max_steps": 2, "report_to": []},
        "output": {"dir": str(folder / "outputs")}, "eval": {"generate_rows": 0},
    }  # fmt: skip
    for section, changes in sections.items():
        settings[section] = {**settings.get(section, {}), **changes}
    path = folder / "run.yaml"
    path.write_text(json.dumps(settings))
    return path


def refusal_of(error: type[Exception], function: Callable[..., Any], *words: Any, **options: Any) -> str:
    """The message with which a function refuses what it is given."""
    with pytest.raises(error) as caught:
        function(*words, **options)
    return str(caught.value)


def need_documents_extra() -> None:
    """Skips a test that reads documents where the extra is not installed."""
    from sft_play.documents import DOCUMENT_PACKAGES

    for module in DOCUMENT_PACKAGES.values():
        pytest.importorskip(module, reason="the documents extra is not installed; make test adds it")


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command line in this process: (exit code, everything it printed but that it takes long)."""
    from sft_play.cli import main
    from sft_play.process import waiting

    monkeypatch.setattr(waiting, "FIRST_LINE_S", 120.0)  # on a busy machine everything does

    def run(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main(list(words))
        out, err = capfd.readouterr()
        return code, out + err

    return run


@pytest.fixture
def succeed(command: Command) -> Callable[..., str]:
    """Runs a command line that has to end with exit code 0; returns everything it printed."""

    def run(*words: str) -> str:
        code, printed = command(*words)
        assert code == 0, printed
        return printed

    return run


@pytest.fixture
def refuse(command: Command) -> Callable[..., str]:
    """Runs a command line that has to be refused with one error; returns everything it printed."""

    def run(*words: str) -> str:
        code, printed = command(*words)
        assert (code, printed.count("error:")) == (2, 1), printed
        return printed

    return run


def digest(value: Any) -> str:
    """Sixteen characters that stand for a value; floats by six digits, which no processor rounds otherwise."""
    plain = json.loads(json.dumps(value, default=str), parse_float=lambda text: f"{float(text):.6g}")
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
