"""The command line: reads words and environment, composes the rooms, answers with an exit code. No defaults."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from sft_play import runs
from sft_play.config.load import LoadedConfig, load_config, split_overrides
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFit, Interrupted, SftPlayError
from sft_play.facts.architecture import hub_answers, local_folder, shape_of
from sft_play.facts.hardware import Hardware, detect, named
from sft_play.log import escape_control, redact, set_up_logging, start_log_buffer
from sft_play.plan.plan import Plan, batch_lines, detected_lines, make_plan, require_fit
from sft_play.runs import RunFolder
from sft_play.starter.names import BASE_NAME, CONFIG

logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = Interrupted.exit_code
COMMANDS = {
    "train": "fine-tune the model of a run YAML",
    "resume": "go on with the newest unfinished run of a config, or with RUN",
    "plan": "predict memory and choose the batch, before anything loads",
    "generate": "renew generated files: configs/reference.yaml, configs/run.schema.json, the starter's data",
}


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one message of the project's own error tree."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see sft-play --help")


def parser() -> argparse.ArgumentParser:
    """The flags there are."""
    made = _Parser(
        prog="sft-play",
        description="Plan, explain and run supervised fine-tuning.",
        epilog="commands: " + "; ".join(f"{name}: {text}" for name, text in COMMANDS.items()),
        allow_abbrev=False,
    )
    made.add_argument("command", help=", ".join(COMMANDS))
    made.add_argument("--config", help="run YAML (make: CONFIG)")
    made.add_argument("--hardware", help="plan for a named machine, such as 2xH200 (make: HARDWARE)")
    made.add_argument("--run", help="name of the run to resume (make: RUN)")
    made.add_argument("--json", action="store_true", default=None, help="print one JSON object and nothing else")
    made.add_argument("--out", help="write the JSON to this file too (make: OUT)")
    made.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the run YAML (make: SET)")
    return made


@dataclasses.dataclass(frozen=True)
class Request:
    """What a command was asked: words first, then the environment that make passes."""

    command: str
    config: Path
    overrides: tuple[str, ...]
    hardware: str | None
    run: str | None
    json: bool
    out: Path | None


def read_request(words: Sequence[str], environment: Mapping[str, str]) -> Request:
    """The request of a command line; raises ConfigError for words that mean nothing."""
    given = parser().parse_intermixed_args(list(words))
    if given.command not in COMMANDS:
        near = difflib.get_close_matches(given.command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {escape_control(given.command)}; {hint}")

    def value(flag: str | None, variable: str) -> str | None:
        return flag if flag is not None else environment.get(variable) or None

    out = value(given.out, "OUT")
    return Request(
        command=given.command,
        config=Path(os.path.expanduser(value(given.config, "CONFIG") or CONFIG)),  # noqa: PTH111  (no error for ~nobody)
        overrides=(*split_overrides(environment.get("SET", "")), *given.overrides),
        hardware=value(given.hardware, "HARDWARE"),
        run=value(given.run, "RUN"),
        json=bool(given.json) or environment.get("JSON", "") not in ("", "0"),
        out=Path(out) if out else None,
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (0 done, 2 for the user to mend, 3 does not fit, 130 stopped)."""
    words = sys.argv[1:] if words is None else words
    command = next((word for word in words if not word.startswith("-")), "sft-play")
    set_up_logging(escape_control(command)[:20], stream=sys.stderr)
    try:
        request = read_request(words, os.environ)
        set_up_logging(request.command, stream=sys.stderr if request.json else sys.stdout)
        return _COMMANDS[request.command](request)
    except SftPlayError as error:
        _tell(command, error)
        return error.exit_code
    except KeyboardInterrupt:
        logger.warning("stopped by the user; what was saved until then is kept")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _tell(command: str, error: SftPlayError) -> None:
    """The message of an error on standard error, safe to show."""
    sys.stdout.flush()
    kind = "" if isinstance(error, Interrupted) else "error: "
    sys.stderr.write(redact(f"[{command}] {kind}{escape_control(str(error))}\n"))


def _plan(request: Request) -> int:
    loaded = load_config(request.config, overrides=request.overrides)
    hardware = named(request.hardware) if request.hardware else detect()
    plan = _make_plan(loaded.config, hardware, ranks=max(1, len(hardware.gpus)))
    if request.out is not None:
        _write_out(request.out, plan)
    if request.json:
        sys.stdout.write(json.dumps(plan.as_json()) + "\n")
    else:
        for line in [*detected_lines(hardware), *batch_lines(plan, loaded.config)]:
            logger.info("%s", line)
        require_fit(plan, loaded.config)
    return 0 if plan.fits else DoesNotFit.exit_code


def _write_out(path: Path, plan: Plan) -> None:
    """The plan's JSON in a file of its own; raises ConfigError where it cannot be written."""
    try:
        runs.write_json(path, plan.as_json())
    except OSError as error:
        raise ConfigError(f"OUT={escape_control(str(path))} cannot be written: {error.strerror}") from None


def _make_plan(config: RunConfig, hardware: Hardware, *, ranks: int = 1) -> Plan:
    model = config.model
    shape = shape_of(model.name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    return make_plan(config, shape, hardware, ranks=ranks)


def _train(request: Request) -> int:
    _refuse_hardware(request)
    if request.run:
        raise ConfigError(
            f"RUN={escape_control(request.run)} names a run for make resume; a new one is named output.name"
        )
    loaded = load_config(request.config, overrides=request.overrides)
    output = loaded.config.output
    folder = runs.new_folder(output, config_path=loaded.path)
    resume = folder.path.exists() and output.if_exists == "resume"
    if resume and folder.manifest().get("status") == "finished":
        logger.info("The run %s is finished; there is nothing to resume", folder.path)
        return 0
    return _start(loaded, folder, resume=resume)


def _refuse_hardware(request: Request) -> None:
    if request.hardware:
        raise ConfigError(
            f"HARDWARE={escape_control(request.hardware)} names a machine for make plan; training uses the one there is"
        )


def _resume(request: Request) -> int:
    _refuse_hardware(request)
    loaded = load_config(request.config, overrides=request.overrides)
    folder = runs.find_resumable(loaded.config.output, config_path=loaded.path, name=request.run)
    return _start(loaded, folder, resume=True)


def _with_starter(loaded: LoadedConfig) -> LoadedConfig:
    """The config with the starter's base model, made now if it is not there, in place of its name."""
    if loaded.config.model.name != BASE_NAME:
        return loaded
    from sft_play.train.starter_base import ensure_base

    overrides = (*loaded.overrides, f"model.name={json.dumps(str(ensure_base()))}")
    return dataclasses.replace(
        load_config(loaded.path, overrides=overrides), text=loaded.text, overrides=loaded.overrides
    )


def _start(loaded: LoadedConfig, folder: RunFolder, *, resume: bool) -> int:
    buffer = start_log_buffer()
    hardware = _one_gpu(detect())
    planned = _as_started(loaded.config, folder) if resume else loaded.config
    plan = _make_plan(planned, hardware)
    require_fit(plan, planned)
    from sft_play.data.files import data_paths

    for line in batch_lines(plan, planned):
        logger.info("%s", line)
    if not plan.fits:
        logger.warning("the batch that was given is predicted not to fit; it is tried because it was given")
    paths = data_paths(loaded.config.data)
    loaded = _with_starter(loaded)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    _offline_without_hub(loaded.config.model.name)
    from sft_play.train.run import Job, run

    run(Job(loaded, plan, paths, folder, resume=resume, log_buffer=buffer))
    return 0


def _offline_without_hub(name: str) -> None:
    """Tell the libraries, before they are imported, not to wait for a hub that does not answer."""
    if local_folder(name) is None and not hub_answers():
        logger.info("The hub cannot be reached: %s is looked for in the local cache only", name)
        os.environ["HF_HUB_OFFLINE"] = "1"


def _one_gpu(hardware: Hardware) -> Hardware:
    """The machine as one process uses it: one GPU, the others idle and said so.

    Several visible GPUs would make transformers wrap the model in DataParallel and multiply the batch.
    """
    for line in detected_lines(hardware):
        logger.info("%s", line)
    if len(hardware.gpus) < 2:
        return hardware
    first = hardware.gpus[0]
    idle = len(hardware.gpus) - 1
    logger.info("Using GPU %d; %d other GPU%s idle (make train-distributed uses them all)",
                first.index, idle, "s stay" if idle > 1 else " stays")  # fmt: skip
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = str(first.index)
    return hardware.first(1)


def _as_started(config: RunConfig, folder: RunFolder) -> RunConfig:
    """The config to plan with: the batch that the run was started with, where the config leaves it open.

    What is free on the GPU may have changed; the order of the data, and so every number, must not.
    """
    batch = folder.manifest().get("batch")
    batch = batch if isinstance(batch, dict) else {}
    numbers = [batch.get(name) for name in ("micro_batch", "grad_accum", "ranks")]
    micro, accum, ranks = (number if isinstance(number, int) else 0 for number in numbers)
    is_open = config.train.batch_size == "auto" and config.train.grad_accum == "auto"
    if not is_open or micro * accum * ranks != config.train.effective_batch_size:
        return config
    logger.info("Batch: micro %d x accum %d, as the run was started", micro, accum)
    return config.model_copy(
        update={"train": config.train.model_copy(update={"batch_size": micro, "grad_accum": accum})}
    )


def _generate(request: Request) -> int:
    from sft_play.config.reference import write_generated
    from sft_play.starter.files import write

    for path in [*write_generated(Path.cwd()), *write(Path.cwd())]:
        logger.info("wrote %s", path)
    return 0


_COMMANDS = {"train": _train, "resume": _resume, "plan": _plan, "generate": _generate}
