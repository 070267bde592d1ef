"""llama.cpp's own converters, found or fetched, and run as a program of their own.

They travel in the source package of llama-cpp-python, which pip downloads (index, proxies and certificates are the
user's own settings) and compares with the digest below. Nothing of that package is built, and of its files only the
converters and the table of pre-tokenizers are unpacked.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sft_play.errors import BackendError, ConfigError
from sft_play.files import ROOT, atomic, cache_dir, hold_lock
from sft_play.log import one_line
from sft_play.process import signals

logger = logging.getLogger(__name__)

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
CONVERTER = "convert_hf_to_gguf.py"
# The file that names the pre-tokenizers which llama.cpp knows, with their expressions.
VOCABULARIES = Path("src") / "llama-vocab.cpp"
_VENDORED = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
_WANTED = ("conversion/", "gguf-py/gguf/", CONVERTER, "LICENSE", str(VOCABULARIES))
_LAST_LINES = 6

# pip builds a source package's metadata by running its build system. This one answers from what is known already, so
# that nothing is installed, compiled or run for a download.
_BUILD_SYSTEM = f"""
from pathlib import Path

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = Path(metadata_directory) / "llama_cpp_python-{VERSION}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: {PACKAGE}\\nVersion: {VERSION}\\n")
    return folder.name
"""


@dataclass(frozen=True)
class Converter:
    """A folder with llama.cpp's converters, and how it is called in messages."""

    folder: Path
    version: str

    @property
    def vocabularies(self) -> Path:
        """The source file with the pre-tokenizers; a checkout may lack it."""
        return self.folder / VOCABULARIES


def has_llama_cpp() -> bool:
    """Whether llama-cpp-python can be imported here."""
    return importlib.util.find_spec("llama_cpp") is not None


def find_converter(given: Path | None) -> Converter:
    """llama.cpp's converters: of the checkout that `given` names, else those in the cache, which are fetched the first
    time. Raises ConfigError where `given` holds none, or they cannot be fetched."""
    if given is None:
        return _cached()
    if not (given / CONVERTER).is_file() or not (given / "gguf-py" / "gguf").is_dir():
        has = f"which has {CONVERTER} and gguf-py/; leave it out to fetch the converter"
        raise ConfigError(f"LLAMA_CPP={one_line(str(given))} is not a checkout of llama.cpp, {has}")
    return Converter(given.resolve(), f"LLAMA_CPP={given}")


def _cached() -> Converter:
    folder = cache_dir() / "llama.cpp"
    final = folder / f"{VERSION}-{SHA256[:12]}"
    converter = Converter(final, f"{PACKAGE} {VERSION}")
    if (final / CONVERTER).is_file():
        return converter
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"({error.strerror}); set SFT_PLAY_CACHE to a folder of yours"
        raise ConfigError(f"the cache {folder} cannot be created {why}") from None
    with hold_lock(folder / "lock", waiting="Another run is fetching llama.cpp's converter: waiting for it"):
        # looked for again: another process may have unpacked it while this one waited for the lock
        if (final / CONVERTER).is_file():
            return converter
        # always the same name, since this process holds the lock: what a killed one left is removed
        with atomic.replace_path(final, temporary=folder / ".building") as building:
            fetched = building / "fetched"
            unpack(_download(fetched), building)
            shutil.rmtree(fetched, ignore_errors=True)
    return converter


def _download(folder: Path) -> Path:
    logger.info("llama.cpp's converter is not in the cache: fetching %s %s (73 MiB), once", PACKAGE, VERSION)
    wanted, build, target = folder / "wanted.txt", folder / "build", folder / "download"
    (build / "scikit_build_core").mkdir(parents=True)
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    (build / "scikit_build_core" / "__init__.py").write_text("", encoding="utf-8")
    (build / "scikit_build_core" / "build.py").write_text(_BUILD_SYSTEM, encoding="utf-8")
    words = [
        *(sys.executable, "-m", "sft_play.process.signals", "pip", "download"),
        *("--no-deps", "--no-binary", PACKAGE, "--no-build-isolation"),
        *("--require-hashes", "--no-input", "--progress-bar", "off", "--disable-pip-version-check"),
        *("-r", str(wanted), "-d", str(target)),
    ]
    path = os.pathsep.join(filter(None, [str(build), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = signals.child_environment({**os.environ, "PYTHONPATH": path})
    done = subprocess.run(
        words, capture_output=True, text=True, errors="replace", env=environment, cwd=folder, check=False
    )
    archives = sorted(target.glob("*.tar.gz")) if target.is_dir() else []
    if done.returncode or not archives:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        reason = next((line for line in lines if line.lstrip().startswith("ERROR")), lines[-1] if lines else "no pip")
        absent = f"llama.cpp's converter is not in the cache ({cache_dir()}) and pip cannot fetch it"
        way_out = f"Give LLAMA_CPP= a checkout of llama.cpp; {PACKAGE}'s source package has one, in vendor/"
        raise ConfigError(f"{absent}: {one_line(reason, limit=200)}. {way_out}")
    return archives[0]


def unpack(archive: Path, target: Path) -> None:
    """Write the converters of the source package, whose digest has been compared, into the folder `target`; raises
    ConfigError where it cannot be unpacked."""
    try:
        with tarfile.open(archive) as package:
            for member in package:
                name = member.name.removeprefix(_VENDORED)
                is_wanted = name != member.name and name.startswith(_WANTED) and ".." not in Path(name).parts
                content = package.extractfile(member) if is_wanted else None
                if content is not None:  # a file
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    (target / name).write_bytes(content.read())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"{archive} cannot be unpacked: {one_line(str(error))}") from None
    if not (target / CONVERTER).is_file():
        raise ConfigError(f"{archive} holds no {CONVERTER} under {_VENDORED}")


def convert(converter: Converter, model: Path, target: Path, *, quant: str, name: str, vocabulary: str) -> None:
    """Write the model in a folder as the GGUF `target`, by llama.cpp's converter in a process of its own. `name`: the
    model's in the file. `vocabulary`: JSON for `run_converter.py`. Raises BackendError with its last lines where it
    failed."""
    runner = Path(__file__).with_name("run_converter.py")
    words = [str(converter.folder), str(model), "--outfile", str(target), "--outtype", quant, "--model-name", name]
    done = run_python([str(runner), *words], environment={"SFT_PLAY_GGUF_VOCABULARY": vocabulary})
    if done.returncode or not target.is_file():
        hint = "a newer checkout may do better (LLAMA_CPP=)"
        raise BackendError(f"llama.cpp's converter ({converter.version}) failed; {hint}:\n{last_lines(done.stdout)}")


def quantize(source: Path, target: Path, quant: str) -> None:
    """Write the GGUF `source` with weights in fewer bits, by llama.cpp's library in a process of its own. Raises
    BackendError with its last lines where it failed."""
    runner = Path(__file__).with_name("run_quantizer.py")
    done = run_python([str(runner), str(source), str(target), quant], environment={})
    if done.returncode or not target.is_file():
        raise BackendError(
            f"llama.cpp's library could not write {quant} ({done.returncode}):\n{last_lines(done.stdout)}"
        )


def run_python(words: Sequence[str], *, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """This Python with these words, both streams as one text; the variable that would hide gguf-py is left out."""
    kept = {key: value for key, value in os.environ.items() if key != "NO_LOCAL_GGUF"}
    own = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return subprocess.run(
        [sys.executable, "-m", "sft_play.process.signals", sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=signals.child_environment({**kept, **own, **environment}),
        check=False,
    )


def last_lines(text: str) -> str:
    """The end of a program's output, which is where it says what went wrong."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(f"  {one_line(line, limit=300)}" for line in lines[-_LAST_LINES:])
