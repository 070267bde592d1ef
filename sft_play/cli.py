"""The command line: reads words and environment, composes the rooms, answers with an exit code. No defaults."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from sft_play import runs
from sft_play.config.load import LoadedConfig, load_config, split_overrides
from sft_play.config.schema import RunConfig
from sft_play.data.size import rough_size
from sft_play.errors import ConfigError, DoesNotFit, Interrupted, SftPlayError
from sft_play.facts.architecture import (
    ModelShape,
    UnknownArchitecture,
    config_json,
    hub_answers,
    local_folder,
    shape_of,
)
from sft_play.facts.hardware import Hardware, detect, named
from sft_play.log import escape_control, one_line, redact, set_up_logging, start_log_buffer
from sft_play.plan import record, show
from sft_play.plan.candidates import Candidate
from sft_play.plan.layout import BUILT, LAYOUT_NAMES, LayoutName
from sft_play.plan.plan import Confirm, Plan, Traced, Work, make_plan, require_fit
from sft_play.plan.precision import choose_precision
from sft_play.plan.whatif import Largest, Question, grid, question
from sft_play.runs import RunFolder
from sft_play.starter.names import BASE_NAME, CONFIG

logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = Interrupted.exit_code
COMMANDS = {
    "train": "fine-tune the model of a run YAML",
    "resume": "go on with the newest unfinished run of a config, or with RUN",
    "plan": "predict memory and speed, choose layout and batch, and say why, before anything loads",
    "memory-model-score": "score the memory model on measured peaks that others published",
    "generate": "renew generated files: configs/reference.yaml, configs/run.schema.json, the starter's data",
}

VARIABLES = ("CONFIG", "HARDWARE", "RUN", "JSON", "OUT", "TRACE", "WHATIF", "MAX", "PRICE", "PEAKS")
"""What make passes in the environment; each is a flag too."""


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
    made.add_argument(
        "--trace", action="store_true", default=None, help="plan: confirm the choice by a trace (TRACE=1)"
    )
    made.add_argument("--whatif", help="plan: a grid, such as model.max_seq_len=2048,4096 (make: WHATIF)")
    made.add_argument("--max", help="plan: find the largest seq_len, batch or model that fits (make: MAX)")
    made.add_argument("--price", help="plan: money per GPU-hour (make: PRICE)")
    made.add_argument("--peaks", help="memory-model-score: CSV of measured peaks (make: PEAKS)")
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
    trace: bool = False
    whatif: tuple[tuple[str, ...], ...] = ()
    max: Question | None = None
    price: float | None = None
    peaks: Path | None = None


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
    overrides = (*split_overrides(environment.get("SET", "")), *given.overrides)
    _refuse_variables(overrides)
    return Request(
        command=given.command,
        config=Path(os.path.expanduser(value(given.config, "CONFIG") or CONFIG)),  # noqa: PTH111  (no error for ~nobody)
        overrides=overrides,
        hardware=value(given.hardware, "HARDWARE"),
        run=value(given.run, "RUN"),
        json=bool(given.json) or environment.get("JSON", "") not in ("", "0"),
        out=Path(out) if out else None,
        trace=bool(given.trace) or environment.get("TRACE", "") not in ("", "0"),
        whatif=_cells(value(given.whatif, "WHATIF")),
        max=question(largest) if (largest := value(given.max, "MAX")) else None,
        price=_price(value(given.price, "PRICE")),
        peaks=Path(peaks).expanduser() if (peaks := value(given.peaks, "PEAKS")) else None,
    )


def _refuse_variables(overrides: Sequence[str]) -> None:
    """Raises ConfigError for a variable of make that stands among the settings of the run YAML."""
    for word in overrides:
        name, _, text = word.partition("=")
        if name in VARIABLES:
            raise ConfigError(
                f"{escape_control(word)} is a variable of make, not a setting: give it to make (make plan {name}=...), "
                f"in the environment, or as --{name.lower()} {shlex.quote(escape_control(text))}"
            )


def _cells(text: str | None) -> tuple[tuple[str, ...], ...]:
    """The settings of each cell of WHATIF; raises ConfigError for what is no grid."""
    if text is None:
        return ()
    try:
        words = split_overrides(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("SET=", "WHATIF=", 1)) from None
    _refuse_variables(words)
    return tuple(grid(words))


def _price(text: str | None) -> float | None:
    """Money per GPU-hour; raises ConfigError for what is no number of at least 0."""
    if text is None:
        return None
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise ConfigError(f"PRICE={escape_control(text)} is not the money of a GPU-hour, such as PRICE=2.5")
    return price


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
    hardware = _machine(request)
    configs = [(cell, _cell_config(request, cell)) for cell in request.whatif]
    _say_quantised(loaded.config)
    plan = _plan_for(loaded.config, hardware, trace=request.trace)
    answer = plan.as_json()
    cells = [(cell, _cell_plan(cell, config, hardware)) for cell, config in configs]
    if cells:
        answer["whatif"] = [{"settings": list(cell), **one.as_json()} for cell, one in cells]
    largest = _largest(request.max, loaded.config, hardware) if request.max else None
    if largest is not None:
        answer["max"] = dataclasses.asdict(largest)
    if request.out is not None:
        _write_out(request.out, answer)
    if request.json:
        sys.stdout.write(json.dumps(answer) + "\n")
        return 0 if plan.fits else DoesNotFit.exit_code
    for line in show.plan_lines(plan, loaded.config, command=_launch_command(plan, loaded)):
        logger.info("%s", line)
    for line in [*show.grid_lines(cells), *([show.largest_line(largest)] if largest else [])]:
        logger.info("%s", line)
    require_fit(plan, loaded.config)
    return 0 if plan.fits else DoesNotFit.exit_code


def _machine(request: Request) -> Hardware:
    """The machine to plan for, with the price that was given."""
    hardware = named(request.hardware) if request.hardware else detect()
    return hardware if request.price is None else dataclasses.replace(hardware, price_per_gpu_hour=request.price)


def _cell_config(request: Request, cell: tuple[str, ...]) -> RunConfig:
    """The config of one cell of a grid."""
    try:
        return load_config(request.config, overrides=(*request.overrides, *cell)).config
    except ConfigError as error:
        raise ConfigError(f"WHATIF, {escape_control(' '.join(cell))}: {error}") from None


def _cell_plan(cell: tuple[str, ...], config: RunConfig, hardware: Hardware) -> Plan:
    """The plan of one cell of a grid: what it needs, without looking for ways out."""
    try:
        return _plan_for(config, hardware, with_ways_out=False)
    except SftPlayError as error:
        raise type(error)(f"WHATIF, {escape_control(' '.join(cell))}: {error}") from None


def _say_quantised(config: RunConfig) -> None:
    """Says where the weights as they are stored are not those that a run would load."""
    stored = config_json(config.model.name, revision=config.model.revision).get("quantization_config")
    method = stored.get("quant_method", "unknown method") if isinstance(stored, dict) else None
    if method is not None and not (method == "bitsandbytes" and config.tuning.mode == "qlora"):
        logger.warning("the weights of %s are stored quantised (%s), which training refuses; this is the plan of the "
                       "unquantised model", config.model.name, one_line(str(method)))  # fmt: skip


def _largest(what: Question, config: RunConfig, hardware: Hardware) -> Largest:
    from sft_play.plan.largest import largest_that_fits

    return largest_that_fits(what, config, _shape(config), hardware, has_eval=_has_eval(config))


def _launch_command(plan: Plan, loaded: LoadedConfig) -> str:
    """How to start what was planned; a layout that cannot be launched says so."""
    words = ["make", "train", f"CONFIG={loaded.path}"]
    if loaded.overrides:
        words.append(f"SET={' '.join(_setting(word) for word in loaded.overrides)}")
    command = shlex.join(words)
    if plan.layout in BUILT:
        return command
    return f"{command} (on one GPU: this version does not launch {plan.layout})"


def _setting(word: str) -> str:
    """A setting as SET= is split: quoted only where it holds what would split it."""
    return shlex.quote(word) if re.search(r"""[\s'"\\]""", word) else word


def _memory_model_score(request: Request) -> int:
    if request.peaks is None:
        raise ConfigError("PEAKS= names no file; give the CSV of measured peaks: make memory-model-score PEAKS=FILE")
    from sft_play.trace.score import score

    report = score(request.peaks, out=request.out)
    if request.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        for line in report.table_lines():
            logger.info("%s", line)
    return 0


def _write_out(path: Path, answer: object) -> None:
    """JSON in a file of its own; raises ConfigError where it cannot be written.

    A device or a pipe (`/dev/stdout`) is written to: a file that is renamed would take its place.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
        else:
            runs.write_json(path.resolve() if path.is_symlink() else path, answer)
    except OSError as error:
        raise ConfigError(f"OUT={escape_control(str(path))} cannot be written: {error.strerror}") from None


def _shape(config: RunConfig) -> ModelShape:
    """The model's shapes; those of a class that the tables do not know are measured on the meta device."""
    model = config.model
    try:
        return shape_of(model.name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except UnknownArchitecture as error:
        logger.info("%s; building it without memory to measure it", error)
        from sft_play.trace.meta_shape import shape_on_meta

        return shape_on_meta(
            config_json(model.name, revision=model.revision),
            name=model.name,
            trust_remote_code=model.trust_remote_code,
        )


def _has_eval(config: RunConfig) -> bool:
    """Whether evaluation batches run beside the training."""
    data = config.data
    return data.val_path is not None or data.test_path is not None or data.val_fraction > 0


def _plan_for(
    config: RunConfig,
    hardware: Hardware,
    *,
    only: tuple[LayoutName, ...] = LAYOUT_NAMES,
    trace: bool = False,
    with_ways_out: bool = True,
) -> Plan:
    """The plan with everything that is known here: earlier runs, the size of the data, a trace where asked."""
    shape = _shape(config)
    return make_plan(
        config,
        shape,
        hardware,
        only=only,
        has_eval=_has_eval(config),
        confirm=_tracer(config, shape, hardware) if trace else None,
        earlier=[] if hardware.named else record.load(),
        work=_work(config),
        with_ways_out=with_ways_out,
    )


def _tracer(config: RunConfig, shape: ModelShape, hardware: Hardware) -> Confirm:
    """Traces candidates of this config; the libraries are imported at the first one."""

    def confirm(candidate: Candidate) -> Traced:
        from sft_play.trace.confirm import trace_candidate

        model = config_json(config.model.name, revision=config.model.revision)
        return trace_candidate(config, model, shape, choose_precision(config, hardware), candidate)

    return confirm


def _work(config: RunConfig) -> Callable[[int], Work | None]:
    """How many steps and tokens a run has, by the size of its file."""

    def work(effective: int) -> Work | None:
        text = config.task_mode == "cpt"
        size = rough_size(config.data, text_wanted=text)
        steps = config.train.max_steps
        if size is None:
            return Work(steps, None) if steps else None
        rows = max(1, size.tokens // config.model.max_seq_len) if text else size.rows
        per_epoch = math.ceil(rows / effective)
        steps = steps or max(1, math.ceil(per_epoch * config.train.epochs))
        tokens = min(size.tokens, rows * config.model.max_seq_len)
        return Work(steps, int(tokens * steps / per_epoch))

    return work


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
    whole = detect()
    hardware = _one_gpu(whole)
    planned = _as_started(loaded.config, folder) if resume else loaded.config
    plan = _plan_for(planned, hardware, only=BUILT, trace=planned.plan.trace and bool(hardware.gpus))
    _say_what_all_would_do(planned, whole, plan)
    require_fit(plan, planned)
    from sft_play.data.files import data_paths

    for line in [show.choice_line(plan), *show.batch_lines(plan, planned)]:
        logger.info("%s", line)
    if not plan.fits:
        logger.warning("the batch that was given is predicted not to fit; it is tried because it was given")
    paths = data_paths(loaded.config.data)
    loaded = _with_starter(loaded)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    _offline_without_hub(loaded.config.model.name)
    from sft_play.train.run import Job, run

    summary = run(Job(loaded, plan, paths, folder, resume=resume, log_buffer=buffer))
    _remember(planned, plan, summary)
    return 0


def _say_what_all_would_do(config: RunConfig, whole: Hardware, plan: Plan) -> None:
    """Says which layout the plan would take on all GPUs, where this command uses one of several."""
    if len(whole.gpus) < 2 or config.train.effective_batch_size % len(whole.gpus):
        return
    try:
        all_of_them = _plan_for(config, whole)
    except SftPlayError:
        return
    if all_of_them.fits:
        logger.info("On all %d GPUs the plan would take %s, which this version does not launch; this run is %s",
                    len(whole.gpus), all_of_them.layout, plan.layout)  # fmt: skip


def _remember(config: RunConfig, plan: Plan, summary: dict[str, Any]) -> None:
    """Keep what the run measured beside what was predicted, for later plans on this machine."""
    peak, gpus = summary["peak_bytes"], plan.hardware.gpus
    reserved = peak["measured_reserved"] if gpus else peak["measured_rss"]
    if not reserved or not summary["tokens_per_s"]:
        return
    record.add(
        record.Measured(
            device=gpus[0].name if gpus else "cpu",
            mode=config.tuning.mode,
            layout=plan.layout,
            model=config.model.name,
            micro_batch=plan.batch.micro_batch,
            seq_len=plan.max_seq_len,
            predicted_allocated=plan.memory.allocated,
            measured_allocated=peak["measured_allocated"] or 0,
            predicted_reserved=plan.memory.reserved,
            measured_reserved=reserved,
            predicted_tokens_per_s=plan.speed.tokens_per_s,
            measured_tokens_per_s=summary["tokens_per_s"],
            versions=" ".join(f"{name} {version}" for name, version in sorted(runs.versions().items())),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    )


def _offline_without_hub(name: str) -> None:
    """Tell the libraries, before they are imported, not to wait for a hub that does not answer."""
    if local_folder(name) is None and not hub_answers():
        logger.info("The hub cannot be reached: %s is looked for in the local cache only", name)
        os.environ["HF_HUB_OFFLINE"] = "1"


def _one_gpu(hardware: Hardware) -> Hardware:
    """The machine as one process uses it: one GPU, the others idle and said so.

    Several visible GPUs would make transformers wrap the model in DataParallel and multiply the batch.
    """
    for line in show.detected_lines(hardware):
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


_COMMANDS = {
    "train": _train,
    "resume": _resume,
    "plan": _plan,
    "memory-model-score": _memory_model_score,
    "generate": _generate,
}
