"""The program run in Unsloth's environment: `python unsloth_worker.py HANDOVER.json`, or `--probe`
to report on it. It imports this package from its own folder, and Unsloth first, which patches
transformers."""

import contextlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

# Begins the line with the answer to `--probe`; Unsloth prints lines of its own before it.
PROBE_PREFIX = "sft-play answers: "
# Modules that the training loop imports and Unsloth does not depend on.
NEEDED_PACKAGES = (
    "psutil",
    "pydantic",
    "yaml",
    "pyarrow",
    "rich",
    "jinja2",
    "packaging",
    "safetensors",
)
# Packages whose versions go into the manifest.
RECORDED_PACKAGES = (
    *(
        "unsloth",
        "unsloth_zoo",
        "torch",
        "transformers",
        "trl",
        "peft",
        "accelerate",
        "bitsandbytes",
        "datasets",
    ),
    *("triton", "xformers"),
)


def package_versions() -> dict[str, str | None]:
    """Versions of Python and RECORDED_PACKAGES; None for a package that is not installed."""
    versions: dict[str, str | None] = dict.fromkeys(RECORDED_PACKAGES)
    for name in RECORDED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"python": sys.version.split()[0], **versions}


def probe() -> dict[str, Any]:
    """Device and versions after importing Unsloth, or the reason why it cannot be used."""
    try:
        import unsloth
    except Exception as error:  # Unsloth refuses each platform with another class of error
        return {"error": f"{type(error).__name__}: {error}"}
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return {
            "error": (
                f"it has no {', '.join(missing)}, which the"
                " training loop needs (make setup-unsloth has all)"
            )
        }
    # cuda, hip, xpu, npu, mlx or cpu; unsloth_zoo's in some versions
    device = getattr(unsloth, "DEVICE_TYPE", None)
    if device is None:
        from unsloth_zoo.device_type import DEVICE_TYPE

        device = DEVICE_TYPE
    return {"device": str(device), "versions": package_versions()}


def main(arguments: Sequence[str]) -> int:
    """Answer, or train what was handed over; returns sft-play's exit code."""
    package = Path(__file__).resolve().parents[1]
    # this package, whatever the environment has under that name, and not the folder of this file,
    # whose modules have common names
    others = [path for path in sys.path if Path(path).resolve() != package / "training"]
    sys.path[:] = [str(package.parent), *others]
    importlib.import_module("sft_play")
    sys.path[:] = others
    if list(arguments) == ["--probe"]:
        sys.stdout.write(f"\n{PROBE_PREFIX}{json.dumps(probe())}\n")
        return 0
    return run_handover(Path(arguments[0]))


def run_handover(path: Path) -> int:
    """Train as the document at `path` says, in this rank; returns sft-play's exit code. A failure
    is written into the file that the parent named. Nothing here loads torch before Unsloth, whose
    errors become messages.
    """
    from sft_play.errors import BackendError, SftPlayError
    from sft_play.log import one_line, set_up_logging, survive_lost_output
    from sft_play.process import failures, signals

    survive_lost_output()
    set_up_logging("train", rank=int(os.environ.get("RANK", "0")))
    signals.watch_parent()
    try:
        with signals.StopSignals(signals.raise_interrupt):
            try:
                import unsloth  # noqa: F401
            except Exception as error:
                raise BackendError(
                    "Unsloth cannot be imported:"
                    f" {one_line(f'{type(error).__name__}: {error}', limit=400)}"
                ) from error
            from sft_play.training.run import train_stage
            from sft_play.training.unsloth_run import train_handover

            train_handover(path, train_stage)
        return 0
    except SftPlayError as error:
        failures.report_to_agent(error)
        return error.exit_code
    except KeyboardInterrupt as error:
        failures.report_to_agent(error)
        return 130
    except Exception as error:
        failures.report_to_agent(error)
        sys.stderr.write(traceback.format_exc())
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
