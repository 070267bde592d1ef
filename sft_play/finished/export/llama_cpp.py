"""llama.cpp's own converter and quantizer: found or fetched, and run as a program of their own.

The converter travels in the source package of llama-cpp-python, which pip downloads (index, proxies
and certificates are the user's own settings) and compares with the digest below. Nothing of that
package is built, and of its files only the converter is unpacked.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.errors import BackendError, ConfigError
from sft_play.files import ROOT, atomic, cache_dir, hold_lock
from sft_play.log import one_line
from sft_play.process import signals
from sft_play.process.waiting import report_wait

logger = logging.getLogger(__name__)

LLAMA_CPP_PACKAGE, LLAMA_CPP_VERSION = "llama-cpp-python", "0.3.36"
LLAMA_CPP_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
CONVERTER_FILE = "convert_hf_to_gguf.py"
_VENDOR_PREFIX = f"llama_cpp_python-{LLAMA_CPP_VERSION}/vendor/llama.cpp/"

# pip builds a source package's metadata by running its build system. This one answers from what is
# known already, so that nothing is installed, compiled or run for a download.
_BUILD_SYSTEM = f"""
from pathlib import Path

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = Path(metadata_directory) / "llama_cpp_python-{LLAMA_CPP_VERSION}.dist-info"
    folder.mkdir()
    fields = ("Metadata-Version: 2.1", "Name: {LLAMA_CPP_PACKAGE}", "Version: {LLAMA_CPP_VERSION}")
    (folder / "METADATA").write_text("\\n".join(fields) + "\\n")
    return folder.name
"""


def find_converter(checkout: Path | None) -> Path:
    """Find the folder with llama.cpp's converter: `checkout`, else the cache, into which it is
    fetched the first time. Raises ConfigError where `checkout` holds none, or it cannot be
    fetched."""
    if checkout is not None:
        if (
            not (checkout / CONVERTER_FILE).is_file()
            or not (checkout / "gguf-py" / "gguf").is_dir()
        ):
            raise ConfigError(
                f"LLAMA_CPP={one_line(str(checkout))} is not a checkout of llama.cpp, which has "
                f"{CONVERTER_FILE} and gguf-py/; leave it out to fetch the converter"
            )
        return checkout.resolve()
    folder = cache_dir() / "llama.cpp"
    converter_folder = folder / f"{LLAMA_CPP_VERSION}-{LLAMA_CPP_SHA256[:12]}"
    if (converter_folder / CONVERTER_FILE).is_file():
        return converter_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache {folder} cannot be created ({error.strerror}); set SFT_PLAY_CACHE to a"
            " folder of yours"
        ) from None
    with hold_lock(
        folder / "lock",
        waiting_message="Another run is fetching llama.cpp's converter: waiting for it",
    ):
        # looked for again: another process may have unpacked it while this one waited for the lock
        if not (converter_folder / CONVERTER_FILE).is_file():
            # always the same name, since this process holds the lock: what a killed one left is
            # removed
            with atomic.replace_path(
                converter_folder, temporary=folder / ".building"
            ) as staging_folder:
                download_folder = staging_folder / "fetched"
                unpack_converter(_download(download_folder), staging_folder)
                shutil.rmtree(download_folder, ignore_errors=True)
    return converter_folder


def _download(folder: Path) -> Path:
    logger.info(
        "llama.cpp's converter is not in the cache: fetching %s %s (73 MiB), once",
        LLAMA_CPP_PACKAGE,
        LLAMA_CPP_VERSION,
    )
    requirements, download_folder = folder / "wanted.txt", folder / "download"
    build_folder = folder / "build"
    (build_folder / "scikit_build_core").mkdir(parents=True)
    requirements.write_text(
        f"{LLAMA_CPP_PACKAGE}=={LLAMA_CPP_VERSION} --hash=sha256:{LLAMA_CPP_SHA256}\n"
    )
    (build_folder / "scikit_build_core" / "__init__.py").touch()
    (build_folder / "scikit_build_core" / "build.py").write_text(_BUILD_SYSTEM, encoding="utf-8")
    command = [
        *(sys.executable, "-m", "sft_play.process.signals", "pip", "download"),
        *("--no-deps", "--no-binary", LLAMA_CPP_PACKAGE, "--no-build-isolation"),
        *("--require-hashes", "--no-input", "--progress-bar", "off", "--disable-pip-version-check"),
        *("-r", str(requirements), "-d", str(download_folder)),
    ]
    python_path = os.pathsep.join(
        filter(None, [str(build_folder), str(ROOT), os.environ.get("PYTHONPATH")])
    )
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        env=signals.child_environment({**os.environ, "PYTHONPATH": python_path}),
        cwd=folder,
        check=False,
    )
    archives = list(download_folder.glob("*.tar.gz"))
    if process.returncode or not archives:
        lines = ["no pip", *filter(str.strip, (process.stdout + process.stderr).splitlines())]
        reason = next((line for line in lines if line.lstrip().startswith("ERROR")), lines[-1])
        raise ConfigError(
            f"llama.cpp's converter is not in the cache ({cache_dir()}) and pip cannot fetch it: "
            f"{one_line(reason, limit=200)}. Give LLAMA_CPP= a checkout of llama.cpp; "
            f"{LLAMA_CPP_PACKAGE}'s source package has one, in vendor/"
        )
    return archives[0]


def unpack_converter(archive: Path, target: Path) -> None:
    """Write the converter of the source package, whose digest has been compared, into the folder
    `target`; raises ConfigError where it cannot be unpacked."""
    try:
        with tarfile.open(archive) as archive_file:
            for member in archive_file:
                name = member.name.removeprefix(_VENDOR_PREFIX)
                if name != member.name and name.startswith(
                    ("conversion/", "gguf-py/gguf/", CONVERTER_FILE, "LICENSE")
                ):
                    archive_file.extract(
                        member.replace(name=name, deep=False), target, filter="data"
                    )
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"{archive} cannot be unpacked: {one_line(str(error))}") from None
    if not (target / CONVERTER_FILE).is_file():
        raise ConfigError(f"{archive} holds no {CONVERTER_FILE} under {_VENDOR_PREFIX}")


def convert_to_gguf(
    converter_folder: Path,
    model_folder: Path,
    target: Path,
    *,
    quant: str,
    name: str,
    vocabulary: Mapping[str, Any],
    is_projector: bool = False,
) -> None:
    """Convert the model in a folder to the GGUF `target`, by llama.cpp's converter in a process of
    its own. `name` is the model's in the file; `vocabulary` is what `run_llama_cpp.py` reads.
    `is_projector`: what turns images into embeddings, in a file of its own, in place of the
    language model. Raises BackendError with the converter's last lines where it failed."""
    words = [
        *("convert", str(converter_folder), str(model_folder)),
        *("--outfile", str(target), "--outtype", quant, "--model-name", name),
        *(["--mmproj"] if is_projector else []),
    ]
    _run(
        words,
        target,
        task="Writing the GGUF with llama.cpp",
        problem=(
            f"llama.cpp's converter ({converter_folder}) failed;"
            " a newer checkout may do better (LLAMA_CPP=)"
        ),
        SFT_PLAY_GGUF_VOCABULARY=json.dumps(vocabulary),
    )


def quantize_gguf(source: Path, target: Path, quant: str) -> None:
    """Write the GGUF `source` with weights in fewer bits, by llama.cpp's library in a process of
    its own. Raises BackendError with the library's last lines where it failed."""
    _run(
        ["quantize", source, target, quant],
        target,
        task=f"Quantising to {quant} with llama.cpp",
        problem=f"llama.cpp's library could not write {quant}",
    )


def _run(
    words: Sequence[str | Path], target: Path, *, task: str, problem: str, **variables: str
) -> None:
    # NO_LOCAL_GGUF would hide gguf-py
    inherited = {key: value for key, value in os.environ.items() if key != "NO_LOCAL_GGUF"}
    runner = [sys.executable, str(Path(__file__).with_name("run_llama_cpp.py"))]
    with report_wait(task):
        process = subprocess.run(
            [sys.executable, "-m", "sft_play.process.signals", *runner, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=signals.child_environment(
                {
                    **inherited,
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "TRANSFORMERS_VERBOSITY": "error",
                    **variables,
                }
            ),
            check=False,
        )
    if process.returncode or not target.is_file():
        # the end of a program's output is where it says what went wrong
        lines = [line.rstrip() for line in process.stdout.splitlines() if line.strip()]
        last_lines = [f"  {one_line(line, limit=300)}" for line in lines[-6:]]
        raise BackendError("\n".join([f"{problem} (exit code {process.returncode}):", *last_lines]))
