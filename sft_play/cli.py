"""The command line: reads words and environment, composes the rooms, answers with an exit code. No defaults."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from sft_play import failures, runs
from sft_play.config.load import LoadedConfig, flag_hint, load_config, split_overrides
from sft_play.config.schema import OutputConfig, RunConfig
from sft_play.doctor.check import Planned, examine
from sft_play.environment import allocator_setting, waiting_threads
from sft_play.errors import ConfigError, DoesNotFit, Interrupted, SftPlayError, in_stage
from sft_play.facts.architecture import config_json
from sft_play.facts.hardware import Hardware, detect, named
from sft_play.launch import accelerate_config, board_commands
from sft_play.launch.device import machine_for, say_unseen
from sft_play.launch.exported import node_variables, rank_variables, refuse_tasks, refuse_too_few
from sft_play.launch.ranks import Ranks, ranks_of
from sft_play.launch.spread import DEFAULT_PORT, NODE_VARIABLES, Spread, spread_of, with_accelerate
from sft_play.launch.spread import VARIABLES as spread_variables
from sft_play.log import escape_control, one_line, output_is_lost, redact, set_up_logging
from sft_play.plan import record, show
from sft_play.plan.layout import LAYOUT_NAMES, LayoutName, layouts_over
from sft_play.plan.mesh import mesh_of
from sft_play.plan.plan import Plan, require_fit
from sft_play.plan.precision import choose_precision
from sft_play.plan.whatif import Largest, Question, grid, question
from sft_play.runs import RunFolder
from sft_play.start import (
    as_the_mesh_says,
    common_layout,
    go_on,
    has_eval,
    launch,
    plan_for,
    refuse_strategy,
    shape_for,
    start_here,
    start_rank,
)
from sft_play.starter.names import CONFIG
from sft_play.variables import DESCRIBING, FLAGS, TRAINING, VARIABLES, flag_commands, nearest

logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = Interrupted.exit_code
COMMANDS = {
    "train": "fine-tune the model of a run YAML",
    "resume": "go on with the newest unfinished run of a config, or with RUN",
    "train-distributed": "fine-tune over all GPUs (or CPU ranks), in the layout of the plan or STRATEGY",
    "train-deepspeed": "the same with DeepSpeed: ZeRO-2, or what DEEPSPEED_CONFIG says",
    "launch-command": "show the command and variables that start the ranks, and start nothing",
    "setup-accelerate": "write an accelerate configuration for this machine",
    "plan": "predict memory and speed, choose layout and batch, and say why, before anything loads",
    "memory-model-score": "score the memory model on measured peaks that others published",
    "verify-layouts": "train the same run under every layout over CPU ranks or GPUs, and compare with one process",
    "gpu-selftest": "what this machine's GPUs do against what a plan says of them: kernels, peaks, speeds, layouts",
    "tensorboard": "show the curves of all runs in output.dir, or of RUN; it stays until tb-stop",
    "tb-open": "open that page in a browser, or say its address",
    "tb-stop": "stop this project's TensorBoards: all, or those of CONFIG's output.dir or of RUN",
    "tb-clean": "remove the event files of finished runs, after asking (YES=1)",
    "doctor": "look for what breaks a run: versions, drivers, limits, disk, an all-reduce over every rank",
    "consolidate": "write the trained weights of RUN's last checkpoint, ZeRO's included, as safetensors",
    "gpu-info": "show GPUs, driver, topology, host and disk; with HARDWARE what a plan would assume of a machine",
    "memory-check": "show what the ranks of a run hold of each GPU (or of the RAM) beside what was predicted",
    "process": "raw files to checked conversations in train, val and test, with a report of every row left out",
    "style": "give processed conversations a system prompt (STYLE=), into data/processed_with_style",
    "dapt-docx": "documents (.docx, .pdf, .html, .md, .rst, .txt) to clean plain text for task_mode cpt",
    "render": "write the text that the model will see, one row per example, with its mask as spans",
    "preview": "show the tokens of N examples (or of ROW) with the trained part in colour, here and as a page",
    "check": "check everything that can be checked before training, on one page; the exit code tells",
    "full-pipeline": "process, style where asked, render and check",
    "mask-score": "score the loss masks of chat templates (TEMPLATES=, TOKENIZER=)",
    "run-notebook": "run a notebook's cells in order on every rank (NOTEBOOK=, NPROC=)",
    "generate": "renew generated files: configs/reference.yaml, configs/run.schema.json, the starter's data",
}

SHORT_FLAGS = {
    "--lora-rank": "tuning.lora.r",
    "--eval-steps": "eval.steps",
    "--train-dataset": "data.train_path",
    "--eval-dataset": "data.val_path",
    "--output": "output.dir",
}
"""Flags that people know from other tools, and the keys that they mean."""
FIRST_NODE = "NODE0"
"""Stands for an address that a plan cannot know."""
MOST_NODES_SHOWN = 2
RANKS_NEED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
"""Packages that every rank imports: a parent that lacks one says so before it starts any."""


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one message of the project's own error tree."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{escape_control(message)}; see sft-play --help")


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """The flags there are; of a command, with help for its own only."""
    made = _Parser(
        prog="sft-play",
        description=COMMANDS[command] if command else "Plan, explain and run supervised fine-tuning.",
        epilog=None if command else "commands: " + "; ".join(f"{name}: {text}" for name, text in COMMANDS.items()),
        allow_abbrev=False,
    )
    made.add_argument("command", help=", ".join(COMMANDS))

    def add(*flags: str, commands: Sequence[str], text: str, is_switch: bool = False) -> None:
        shown = text if command is None or command in commands else argparse.SUPPRESS
        made.add_argument(*flags, help=shown, default=None, action="store_true" if is_switch else "store")

    for name, variable in VARIABLES.items():
        if variable.has_flag:
            flags = {f"--{name.lower()}": None, f"--{name.lower().replace('_', '-')}": None}
            text = f"{variable.help} (make: {name}{'=1' if variable.kind == 'switch' else ''})"
            add(*flags, commands=flag_commands(name), text=text, is_switch=variable.kind == "switch")
    add("--deepspeed", commands=FLAGS["--deepspeed"], text="let DeepSpeed run it", is_switch=True)
    add("--tensorboard", commands=FLAGS["--tensorboard"], text="start TensorBoard beside the run", is_switch=True)
    add("--local_rank", "--local-rank", commands=(), text=argparse.SUPPRESS)  # deepspeed's launcher passes it
    for flag, key in SHORT_FLAGS.items():
        add(flag, commands=flag_commands("SET"), text=f"the same as {key}=…")
    made.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the run YAML (make: SET)")
    return made


def _flags() -> dict[str, Sequence[str]]:
    """Every flag with the commands that take it."""
    of_variables = {f"--{name.lower()}": flag_commands(name) for name, one in VARIABLES.items() if one.has_flag}
    return {**of_variables, **FLAGS, **{flag: flag_commands("SET") for flag in SHORT_FLAGS}}


def _refuse_flags(given: argparse.Namespace, words: Sequence[str], unknown: Sequence[str]) -> None:
    """Raises ConfigError for flags that nobody knows, that another command takes, that are empty or given twice."""
    command, flags = given.command, _flags()
    wrong = [_unknown_flag(command, word, words, flags) for word in unknown]
    if wrong:
        raise ConfigError(wrong[0] if len(wrong) == 1 else "\n  ".join([f"{len(wrong)} problems:", *wrong]))
    for flag, commands in flags.items():
        value = getattr(given, flag.strip("-").replace("-", "_"))
        if value is None:
            continue
        if command not in commands:
            raise ConfigError(f"{flag} is no flag of {command}; it belongs to {', '.join(commands)}")
        if isinstance(value, str) and not value.strip():
            raise ConfigError(f"{flag} is given and empty (an unset shell variable?): give a value, or leave it out")
        spellings = (flag, flag.replace("_", "-"), f"--{flag[2:].replace('-', '_')}")
        if sum(word.partition("=")[0] in spellings for word in words) > 1:
            raise ConfigError(f"{flag} is given twice; give it once")


def _unknown_flag(command: str, word: str, words: Sequence[str], flags: Mapping[str, Sequence[str]]) -> str:
    """What is wrong with a flag that nobody takes: another tool's is a setting here, given as a word."""
    flag, equals, value = word.partition("=")
    after = [*words, ""][words.index(word) + 1] if word in words else ""
    given = value if equals else after if after and not after.startswith("--") and "=" not in after else None
    known = flag_hint(flag, given) if command in flag_commands("SET") else None
    own = [one for one, commands in flags.items() if command in commands]
    near = None if known else nearest(flag, own, list(flags))
    whose = "" if near is None or near in own else f" (a flag of {', '.join(flags[near])})"
    hint = known or (f"did you mean {near}{whose}?" if near else f"{command} takes {', '.join(own) or 'none'}")
    return f"{command} has no flag {one_line(flag)}; {hint}"


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
    config_given: bool = False
    yes: bool = False
    layouts: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    steps: int | None = None
    full: bool = False
    watch: bool = False
    force: bool = False
    style: str | None = None
    n: int | None = None
    row: int | None = None
    templates: Path | None = None
    tokenizer: str | None = None
    notebook: Path | None = None
    spread: Spread = dataclasses.field(default_factory=Spread)


def read_request(words: Sequence[str], environment: Mapping[str, str]) -> Request:
    """The request of a command line; raises ConfigError for words that mean nothing."""
    named = next((word for word in words if word in COMMANDS), None)
    given, unknown = parser(named).parse_known_intermixed_args(list(words))
    if given.command not in COMMANDS:
        near = difflib.get_close_matches(given.command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {escape_control(given.command)}; {hint}")
    _refuse_flags(given, words, unknown)

    def value(flag: str | None, variable: str) -> str | None:
        return flag if flag is not None else environment.get(variable) or None

    out = value(given.out, "OUT")
    overrides = (*split_overrides(environment.get("SET", "")), *_short(given), *given.overrides)
    asked, notes = _asked(given, environment)
    _refuse_words(given.command, overrides)
    request = Request(
        command=given.command,
        config=Path(os.path.expanduser(value(given.config, "CONFIG") or CONFIG)),  # noqa: PTH111  (no error for ~nobody)
        overrides=overrides,
        hardware=value(given.hardware, "HARDWARE"),
        run=value(given.run, "RUN"),
        json=given.command in flag_commands("JSON")
        and (bool(given.json) or environment.get("JSON", "") not in ("", "0")),
        out=Path(out) if out else None,
        trace=bool(given.trace) or environment.get("TRACE", "") not in ("", "0"),
        whatif=_cells(value(given.whatif, "WHATIF")),
        max=question(largest) if (largest := value(given.max, "MAX")) else None,
        price=_price(value(given.price, "PRICE")),
        config_given=value(given.config, "CONFIG") is not None,
        yes=bool(given.yes) or environment.get("YES", "") not in ("", "0"),
        layouts=_names(value(given.layouts, "LAYOUTS")),
        modes=_names(value(given.modes, "MODES")),
        steps=_count(value(given.steps, "STEPS"), "STEPS", "optimizer steps"),
        force=bool(given.force) or environment.get("FORCE", "") not in ("", "0"),
        style=value(given.style, "STYLE"),
        n=_count(value(given.n, "N"), "N", "examples"),
        row=_count(value(given.row, "ROW"), "ROW", "a row, counted from 1"),
        templates=Path(templates).expanduser() if (templates := value(given.templates, "TEMPLATES")) else None,
        tokenizer=value(given.tokenizer, "TOKENIZER"),
        notebook=Path(notebook).expanduser() if (notebook := value(given.notebook, "NOTEBOOK")) else None,
        full=bool(given.full) or environment.get("FULL", "") not in ("", "0"),
        watch=bool(given.watch) or environment.get("WATCH", "") not in ("", "0"),
        peaks=Path(peaks).expanduser() if (peaks := value(given.peaks, "PEAKS")) else None,
        spread=spread_of(
            asked,
            deepspeed=bool(given.deepspeed) or given.command == "train-deepspeed",
            board=bool(given.tensorboard),
            notes=notes,
        ),
    )
    _refuse_no_config(request, environment)
    return request


def _asked(given: argparse.Namespace, environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """How the run is to be spread, by flags, by make's variables and by what a scheduler exported; lines on the last.

    `train` takes the nodes too where the environment names several: each of them was told to train.
    """
    command = given.command
    found = {
        name: getattr(given, name.lower(), None) or environment.get(name) or ""
        for name in spread_variables
        if command in flag_commands(name)
    }
    if command == "train":  # of a rank, whose words say what its parent's environment said
        found["DEEPSPEED_CONFIG"] = given.deepspeed_config or ""
    if command not in (*TRAINING, "doctor") or rank_variables(environment):
        return found, ()
    exported, notes = node_variables(environment)
    if command == "train":
        names = (*NODE_VARIABLES, "NPROC")
        of_nodes = {name: environment.get(name, "").strip() or exported.get(name, "") for name in names}
        return (found | of_nodes, notes) if of_nodes["NNODES"] not in ("", "1") else (found, ())
    return found | {name: text for name, text in exported.items() if not found.get(name)}, notes


def _refuse_no_config(request: Request, environment: Mapping[str, str]) -> None:
    """Without a config the starter runs, and as such only.

    Raises:
        ConfigError: CONFIG is empty, or a model or data of the user's is given without a run YAML.
    """
    if request.config_given or request.command not in flag_commands("CONFIG"):
        return
    if "CONFIG" in environment:
        raise ConfigError("CONFIG is set and empty (an unset shell variable?): name the run YAML, or unset it: then "
                          "the starter runs")  # fmt: skip
    if not request.overrides or request.command not in (*TRAINING, *DESCRIBING):
        return
    if not request.config.is_file():
        return
    starter = load_config(request.config).config
    asked = load_config(request.config, overrides=request.overrides).config
    for key in ("model.name", "data.sources", "data.train_path", "data.val_path", "data.test_path", "data.text_path",
                "task_mode"):  # fmt: skip
        was, now = (functools.reduce(getattr, key.split("."), config) for config in (starter, asked))
        if not now or now == was:
            continue
        name = asked.model.name if asked.model.name != starter.model.name else "Qwen/Qwen2.5-0.5B-Instruct"
        given = asked.data.train_path
        rows = given if given not in (None, starter.data.train_path) else "my.jsonl"
        raise ConfigError(
            f"{key}={one_line(str(now))} is given without a run YAML, and without CONFIG {request.command} is about "
            f"the starter, a model of two million parameters with rows and settings of its own. Write my.yaml:\n"
            f"  model: {{name: {one_line(json.dumps(name, ensure_ascii=False))}, max_seq_len: 1024}}\n"
            f"  data: {{train_path: {one_line(json.dumps(rows, ensure_ascii=False))}, val_fraction: 0.05}}\n"
            f"and name it: make {request.command} CONFIG=my.yaml (sft-play {request.command} --config my.yaml)"
        )


def _short(given: argparse.Namespace) -> list[str]:
    """Overrides that the short flags mean."""
    values = {key: getattr(given, flag.strip("-").replace("-", "_")) for flag, key in SHORT_FLAGS.items()}
    return [f"{key}={json.dumps(value) if 'path' in key or 'dir' in key else value}" for key, value in values.items()
            if value is not None]  # fmt: skip


def _refuse_words(command: str, overrides: Sequence[str]) -> None:
    """Raises ConfigError for words that are no setting, or settings where the command reads no run YAML."""
    for word in overrides:
        if not word.partition("=")[1] and word.lower().endswith((".yaml", ".yml")):
            raise ConfigError(f"{one_line(word)} is not key=value, such as train.epochs=1; a run YAML is named so: "
                              f"--config {shlex.quote(one_line(word))}")  # fmt: skip
    _refuse_variables(overrides)
    if overrides and command not in flag_commands("SET"):
        raise ConfigError(
            f"{command} reads no run YAML, so that {one_line(overrides[0])} would change nothing; leave it out"
        )


def _refuse_variables(overrides: Sequence[str]) -> None:
    """Raises ConfigError for a variable of make that stands among the settings of the run YAML."""
    for word in overrides:
        name, _, text = word.partition("=")
        name = name.upper()  # no key of the run YAML is a variable's name in small letters
        if name in VARIABLES:
            flag = f", or as --{name.lower()} {shlex.quote(one_line(text))}" if VARIABLES[name].has_flag else ""
            raise ConfigError(
                f"{one_line(word)} is a variable of make, not a setting: give it to make (make plan {name}=...), "
                f"in the environment{flag}"
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


def _names(text: str | None) -> tuple[str, ...]:
    """The names of a list such as `ddp,fsdp`."""
    return tuple(part for part in re.split(r"[\s,]+", text or "") if part)


def _count(text: str | None, name: str, what: str) -> int | None:
    """A whole number from 1; raises ConfigError for what is none."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1_000_000_000):
        raise ConfigError(f"{name}={one_line(text)} is no number of {what}, such as {name}=4")
    return int(text)


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
    os.environ.update(waiting_threads(os.environ))  # OpenMP reads them once, when torch is loaded
    os.environ.update(allocator_setting(os.environ))  # and torch this when it starts CUDA; ranks inherit both
    command = next((word for word in words if not word.startswith("-")), "sft-play")
    set_up_logging(escape_control(command)[:20], stream=sys.stderr)
    failures.begin_process()
    try:
        request = read_request(words, os.environ)
        set_up_logging(request.command, stream=sys.stderr if request.json else sys.stdout)
        return _COMMANDS[request.command](request)
    except SftPlayError as error:
        _tell(command, error)
        return error.exit_code
    except KeyboardInterrupt as error:
        if not failures.hand_over(error):
            logger.warning("stopped by the user; what was saved until then is kept")
        return EXIT_INTERRUPTED
    except Exception as error:
        if not failures.hand_over(error):
            raise
        return 1


def _tell(command: str, error: SftPlayError) -> None:
    """The message of an error on standard error, safe to show; a rank's agent says it for all ranks."""
    sys.stdout.flush()
    if failures.hand_over(error):
        return
    kind = "" if isinstance(error, Interrupted) else "error: "
    sys.stderr.write(redact(f"[{command}] {kind}{escape_control(str(error))}\n"))


def _plan(request: Request) -> int:
    loaded = load_config(request.config, overrides=request.overrides)
    hardware = machine_for(loaded.config, _machine(request))
    say_unseen(loaded.config, hardware, os.environ)
    configs = [(cell, _cell_config(request, cell)) for cell in request.whatif]
    _say_quantised(loaded.config)
    strategy = request.spread.strategy
    refuse_strategy(loaded.config, hardware, strategy)
    stages = _stage_plans(loaded, hardware, strategy, trace=request.trace)
    if stages:
        name, config, plan = max(stages, key=lambda stage: (not stage[2].fits, stage[2].max_seq_len))
        loaded = dataclasses.replace(loaded, config=config, stage=name)
    else:
        plan = plan_for(loaded.config, hardware, only=(strategy,) if strategy else LAYOUT_NAMES, trace=request.trace)
    answer = plan.as_json()
    if stages:
        answer |= {"stage": loaded.stage, "stages": [{"name": name, **one.as_json()} for name, _, one in stages]}
    cells = [(cell, _cell_plan(cell, config, hardware)) for cell, config in configs]
    if cells:
        answer["whatif"] = [{"settings": list(cell), **one.as_json()} for cell, one in cells]
    only = (strategy,) if strategy else LAYOUT_NAMES
    largest = _largest(request.max, loaded.config, hardware, only) if request.max else None
    if largest is not None:
        answer["max"] = dataclasses.asdict(largest)
    if request.out is not None:
        _write_out(request.out, answer)
    if request.json:
        sys.stdout.write(json.dumps(answer) + "\n")
        return 0 if plan.fits else DoesNotFit.exit_code
    by_node = _launches_by_node(plan, loaded)
    if stages:
        logger.info(
            "The plan of stage %s, %s:",
            loaded.stage,
            "the one with the longest rows" if plan.fits else "which does not fit",
        )
    for line in show.plan_lines(plan, loaded.config, command=_launch_command(plan, loaded), by_node=by_node):
        logger.info("%s", line)
    for line in [
        *show.stage_lines(stages),
        *show.grid_lines(cells),
        *([show.largest_line(largest)] if largest else []),
    ]:
        logger.info("%s", line)
    with in_stage(loaded.stage):
        require_fit(plan, loaded.config)
    return 0 if plan.fits else DoesNotFit.exit_code


def _stage_plans(
    loaded: LoadedConfig, hardware: Hardware, strategy: LayoutName | None, *, trace: bool
) -> list[tuple[str, RunConfig, Plan]]:
    """Name, settings and plan of each stage of a curriculum, all in one layout; empty without one."""
    stages = loaded.stages
    if not stages:
        return []
    only = (strategy,) if strategy else LAYOUT_NAMES
    common = strategy or common_layout([stage.config for stage in stages], hardware, only=only)
    return [
        (stage.name, stage.config, plan_for(stage.config, hardware, only=(common,), trace=trace)) for stage in stages
    ]


def _machine(request: Request) -> Hardware:
    """The machine to plan for, with the price that was given."""
    hardware = named(request.hardware) if request.hardware else detect()
    return hardware if request.price is None else dataclasses.replace(hardware, price_per_gpu_hour=request.price)


def _cell_config(request: Request, cell: tuple[str, ...]) -> RunConfig:
    """The config of one cell of a grid."""
    try:
        return load_config(request.config, overrides=(*request.overrides, *cell)).longest
    except ConfigError as error:
        raise ConfigError(f"WHATIF, {escape_control(' '.join(cell))}: {error}") from None


def _cell_plan(cell: tuple[str, ...], config: RunConfig, hardware: Hardware) -> Plan:
    """The plan of one cell of a grid: what it needs, without looking for ways out."""
    try:
        return plan_for(config, hardware, with_ways_out=False)
    except SftPlayError as error:
        raise type(error)(f"WHATIF, {escape_control(' '.join(cell))}: {error}") from None


def _say_quantised(config: RunConfig) -> None:
    """Says where the weights as they are stored are not those that a run would load."""
    stored = config_json(config.model.name, revision=config.model.revision).get("quantization_config")
    method = stored.get("quant_method", "unknown method") if isinstance(stored, dict) else None
    if method is not None and not (method == "bitsandbytes" and config.tuning.mode == "qlora"):
        logger.warning("the weights of %s are stored quantised (%s), which training refuses; this is the plan of the "
                       "unquantised model", config.model.name, one_line(str(method)))  # fmt: skip


def _largest(what: Question, config: RunConfig, hardware: Hardware, only: Sequence[LayoutName]) -> Largest:
    from sft_play.plan.largest import largest_that_fits

    earlier = [] if hardware.named else record.load()
    return largest_that_fits(
        what, config, shape_for(config), hardware, only=only, has_eval=has_eval(config), earlier=earlier
    )


def _launch_command(plan: Plan, loaded: LoadedConfig, *, node: int = 0) -> str:
    """How to start what was planned, on one of its nodes."""
    spreads = plan.layout != "single"
    words = ["make", "train-distributed" if spreads else "train", f"CONFIG={loaded.path}"]
    if spreads:
        words.append(f"STRATEGY={plan.layout}")
    if plan.hardware.nodes > 1:
        words += [f"NNODES={plan.hardware.nodes}", f"NODE_RANK={node}", f"MASTER_ADDR={FIRST_NODE}"]
        words.append(f"MASTER_PORT={DEFAULT_PORT}")
    if loaded.overrides:
        words.append(f"SET={' '.join(_setting(word) for word in loaded.overrides)}")
    return shlex.join(words)


def _launches_by_node(plan: Plan, loaded: LoadedConfig) -> list[str]:
    """What is typed on each of several nodes."""
    nodes, shown = plan.hardware.nodes, min(plan.hardware.nodes, MOST_NODES_SHOWN)
    if nodes == 1:
        return []
    head = f"Launch, with the address of node 0 for {FIRST_NODE} (under Slurm: sbatch --nodes={nodes} "
    lines = [f"{head}scripts/train_slurm.sbatch {shlex.quote(str(loaded.path))}):"]
    lines += [f"  on node {node}: {_launch_command(plan, loaded, node=node)}" for node in range(shown)]
    rest = f"{shown} to {nodes - 1}" if nodes - 1 > shown else f"{shown}"
    return lines + [f"  on node {rest}: the same with NODE_RANK={rest}"] * (nodes > shown)


def _setting(word: str) -> str:
    """A setting as SET= is split: quoted only where it holds what would split it."""
    return shlex.quote(word) if re.search(r"""[\s'"\\]""", word) else word


def _memory_model_score(request: Request) -> int:
    if request.peaks is None:
        raise ConfigError("PEAKS= names no file; give the CSV of measured peaks: make memory-model-score PEAKS=FILE")
    from sft_play.trace.score import score

    report = score(request.peaks, out=request.out, progress=logger.info)
    if request.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        for line in report.table_lines():
            logger.info("%s", line)
    return 0


def _verify_layouts(request: Request) -> int:
    _refuse_hardware(request)
    from sft_play.verify.layouts import STEPS, verify

    table = verify(
        request.config if request.config_given else None,
        request.overrides,
        layouts=request.layouts,
        modes=request.modes,
        steps=request.steps or STEPS,
        progress=logger.info,
    )
    if request.out is not None:
        _write_out(request.out, table.as_json())
    if request.json:
        sys.stdout.write(json.dumps(table.as_json()) + "\n")
    for line in table.lines():
        logger.info("%s", line)
    return 0 if table.ok else 1


def _doctor(request: Request) -> int:
    _refuse_hardware(request)
    spread, file = request.spread, accelerate_config.find_config(os.environ)
    if file is not None:
        spread = with_accelerate(spread, accelerate_config.read_found(file, os.environ)[0])
    on_cpu = False
    with contextlib.suppress(SftPlayError):  # what is wrong with the config is a finding of its own
        config = load_config(request.config, overrides=request.overrides).config
        on_cpu = config.train.device == "cpu"
        spread = as_the_mesh_says(spread, config)

    def planner(machine: Hardware) -> Planned:
        config = load_config(request.config, overrides=request.overrides).longest
        strategy = spread.strategy or ("zero2" if spread.deepspeed else None)
        refuse_strategy(config, machine, strategy)
        only = (strategy,) if strategy else layouts_over(machine.ranks)
        return Planned(config, shape_for(config), plan_for(config, machine, only=only, with_ways_out=False))

    report = examine(planner, spread, on_cpu=on_cpu)
    if request.out is not None:
        _write_out(request.out, report.as_json())
    if request.json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    else:
        for line in report.lines():
            logger.info("%s", line)
    return 0 if report.ok else ConfigError.exit_code


def _gpu_selftest(request: Request) -> int:
    _refuse_hardware(request)
    from sft_play.selftest.report import result_lines
    from sft_play.selftest.selftest import selftest

    book = selftest(request.out)
    if request.json:
        sys.stdout.write(json.dumps(book.as_json()) + "\n")
    else:
        logger.info("%s", "\n".join(result_lines(book)))
    return 0 if book.ok else ConfigError.exit_code


def _gpu_info(request: Request) -> int:
    from sft_play.seeing import gpu_info

    if request.hardware:
        assumed = _machine(request)
        answer, said = gpu_info.assumed_json(assumed), gpu_info.assumed_lines(assumed, request.hardware)
    else:
        machine = gpu_info.look(_outputs(request), os.environ, full=request.full)
        answer, said = machine.as_json(), gpu_info.lines(machine)
    if request.out is not None:
        _write_out(request.out, answer)
    if request.json:
        sys.stdout.write(json.dumps(answer) + "\n")
    else:
        logger.info("%s", "\n".join(said))
    return 0


def _outputs(request: Request) -> Path:
    """The folder of the run folders; the default's where no config was given and the starter's is not here."""
    if not request.config_given and not request.config.is_file():
        return runs.output_dir(OutputConfig())
    return runs.output_dir(load_config(request.config, overrides=request.overrides).config.output)


def _memory_check(request: Request) -> int:
    from sft_play.seeing import memory_check

    _refuse_hardware(request)
    output, peaks = _outputs(request), memory_check.Peaks()

    def take() -> memory_check.Check:
        return memory_check.look(output, os.environ, named=request.run, peaks=peaks)

    def write(check: memory_check.Check) -> None:
        if request.json:
            sys.stdout.write(json.dumps(check.as_json()) + "\n")
            sys.stdout.flush()
        else:
            logger.info("%s", "\n".join(memory_check.lines(check)))
        if output_is_lost():
            raise KeyboardInterrupt  # nobody reads any more: the same end as Ctrl-C

    console = None if request.json else memory_check.terminal(sys.stdout)
    last: memory_check.Check | None
    if request.watch:
        last = memory_check.watch(take, write=write, console=console)
    else:
        last = take()
        write(last)
    if request.out is not None and last is not None:
        _write_out(request.out, last.as_json())
    return 0


def _run_notebook(request: Request) -> int:
    from sft_play import notebook

    if request.notebook is None:
        raise ConfigError("NOTEBOOK= names no file; give a notebook: make run-notebook NOTEBOOK=my.ipynb NPROC=2")
    try:
        cells = notebook.read(request.notebook)
    except SyntaxError as error:
        sys.stderr.write("".join(traceback.format_exception_only(error)))
        return 1
    ranks = ranks_of(os.environ)
    if ranks is not None:
        set_up_logging(request.command, rank=ranks.rank)
        return notebook.run(cells, request.notebook, rank=ranks.rank)
    spread = request.spread
    made = notebook.launch_of(request.notebook, detect(), processes=spread.processes, gpus=spread.gpus)
    logger.info("Launch: %s", made.line)
    notebook.start(made)


def _consolidate(request: Request) -> int:
    if not request.run:
        raise ConfigError("RUN= names no run; give its name or folder: make consolidate RUN=outputs/my-run")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not detect().gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would look for a GPU and warn that there is none
    given = Path(request.run).expanduser()
    is_path = given.name != request.run or (given / runs.MANIFEST).is_file()
    if not is_path:
        output = load_config(request.config, overrides=request.overrides).config.output
        given = runs.output_dir(output) / runs.checked_name(request.run, key="RUN")
    checkpoint = given if given.name.startswith("checkpoint-") else None
    folder = RunFolder(given.parents[1] if checkpoint else given)
    from sft_play.train.consolidate import consolidate

    consolidate(folder, checkpoint=checkpoint, out=request.out)
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


def _train(request: Request) -> int:
    _refuse_hardware(request)
    if request.run:
        raise ConfigError(
            f"RUN={escape_control(request.run)} names a run for make resume; a new one is named output.name"
        )
    loaded = load_config(request.config, overrides=request.overrides)
    output = loaded.config.output
    ranks = _launched(request)
    if ranks is not None:

        def find() -> tuple[RunFolder, bool]:
            folder = runs.new_folder(output, config_path=loaded.path)
            return folder, runs.goes_on(folder, output)

        return start_rank(loaded, ranks, request.spread, find=find)
    _refuse_spread(request)
    mesh = mesh_of(loaded.config.model.mesh_shape)
    if request.spread.nodes.count > 1 or (mesh and mesh.ranks > 1) or _accelerate_names_machines():
        return launch(loaded, request.spread)
    folder = runs.new_folder(output, config_path=loaded.path)
    resume = runs.goes_on(folder, output)
    if resume and runs.is_finished(folder):
        return 0
    return start_here(loaded, folder, resume=resume, board=request.spread.board)


def _accelerate_names_machines() -> bool:
    """Whether the accelerate configuration that a launch would read is one of several machines.

    One that cannot be read is a launch's to refuse: one process needs nothing from it.
    """
    file = accelerate_config.find_config(os.environ)
    if file is None:
        return False
    try:
        return accelerate_config.read_config(file).num_machines > 1
    except ConfigError as error:
        logger.warning("%s; it is not needed for one process", error)
        return False


def _launched(request: Request) -> Ranks | None:
    """This process's place among the ranks that a launcher started; None where it is the only process.

    Raises:
        ConfigError: the launcher was asked for several processes and started one, or started a run for each of them.
    """
    refuse_too_few(os.environ)
    refuse_tasks(os.environ, nodes=request.spread.nodes.count)
    ranks, spread = ranks_of(os.environ), request.spread
    if ranks is None:
        return None
    if spread.processes not in (None, ranks.local_world_size):
        raise ConfigError(
            f"NPROC={spread.processes} asks for {spread.processes} processes on this node, and the launcher started "
            f"{ranks.local_world_size}: give the number to one of them"
        )
    wants_engine = spread.deepspeed or spread.strategy not in (None, "single")
    if ranks.world_size == 1 and ranks.folder is None and not wants_engine:
        return None
    set_up_logging(request.command, rank=ranks.rank)
    return ranks


def _launch(request: Request) -> int:
    _refuse_hardware(request)
    for package in RANKS_NEED:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    if request.command != "launch-command" and ranks_of(os.environ) is not None:
        return _train(request)  # under another launcher, whose ranks these are
    refuse_too_few(os.environ)
    refuse_tasks(os.environ, nodes=request.spread.nodes.count)
    loaded = load_config(request.config, overrides=request.overrides)
    return launch(loaded, dataclasses.replace(request.spread, show_only=request.command == "launch-command"))


def _setup_accelerate(request: Request) -> int:
    environment = os.environ
    path = accelerate_config.config_path(environment)
    if environment.get("INTERACTIVE", "") not in ("", "0"):
        words = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "config", "--config_file", str(path)]
        return subprocess.call(words)
    loaded = load_config(request.config, overrides=request.overrides)
    hardware = machine_for(loaded.config, detect())
    precision = choose_precision(loaded.config, hardware).compute
    written = accelerate_config.write_config(
        path,
        hardware,
        mixed_precision={"bfloat16": "bf16", "float16": "fp16"}.get(precision, "no"),  # type: ignore[arg-type]
        gpu_ids=request.spread.gpus or None,
        processes=request.spread.processes,
        overwrite=environment.get("FORCE", "") not in ("", "0"),
        **dataclasses.asdict(accelerate_config.machines_of(environment)),
    )
    for line in written.lines:
        logger.info("%s", line)
    return 0


def _refuse_hardware(request: Request) -> None:
    if request.hardware:
        raise ConfigError(
            f"HARDWARE={escape_control(request.hardware)} names a machine for make plan; training uses the one there is"
        )


def _refuse_spread(request: Request) -> None:
    """Raises ConfigError for a layout or engine of several ranks where one process was asked for."""
    if request.spread.strategy not in (None, "single") or request.spread.deepspeed:
        raise ConfigError(
            f"{request.command} runs one process, and a layout or DeepSpeed was asked for: use train-distributed or "
            "train-deepspeed, or start the ranks with torchrun"
        )


def _resume(request: Request) -> int:
    _refuse_hardware(request)
    loaded = load_config(request.config, overrides=request.overrides)
    output = loaded.config.output

    def find() -> tuple[RunFolder, bool]:
        return runs.find_resumable(output, config_path=loaded.path, name=request.run), True

    ranks = _launched(request)
    if ranks is not None:
        return start_rank(loaded, ranks, request.spread, find=find)
    return go_on(loaded, find()[0], request.spread)


def _output_dir(request: Request) -> Path:
    return runs.output_dir(load_config(request.config, overrides=request.overrides).config.output)


def _tensorboard(request: Request) -> int:
    board_commands.show(_output_dir(request), request.run, os.environ)
    return 0


def _tb_open(request: Request) -> int:
    board_commands.open_page(_output_dir(request), request.run, os.environ)
    return 0


def _tb_stop(request: Request) -> int:
    is_named = request.config_given or request.run or request.overrides
    return 0 if board_commands.stop(_output_dir(request) if is_named else None, request.run) else 1


def _tb_clean(request: Request) -> int:
    ask = input if sys.stdin is not None and sys.stdin.isatty() else None
    board_commands.clean(_output_dir(request), request.run, yes=request.yes, ask=ask)
    return 0


class _Answer(Protocol):
    """What a command came to: in words, as JSON, and whether it is what was wanted."""

    @property
    def ok(self) -> bool: ...

    def lines(self) -> list[str]: ...

    def as_json(self) -> Any: ...


def _say(request: Request, answer: _Answer, *, out: bool = True) -> int:
    """Say an answer, write it to OUT; the exit code."""
    if out and request.out is not None:
        _write_out(request.out, answer.as_json())
    if request.json:
        sys.stdout.write(json.dumps(answer.as_json()) + "\n")
    else:
        logger.info("%s", "\n".join(answer.lines()))
    return 0 if answer.ok else ConfigError.exit_code


def _process(request: Request) -> int:
    from sft_play.data.process import process

    return _say(request, process(load_config(request.config, overrides=request.overrides).config, force=request.force))


def _style(request: Request) -> int:
    from sft_play.data.style import style

    config = load_config(request.config, overrides=request.overrides).config
    return _say(request, style(config, request.style, force=request.force))


def _dapt_docx(request: Request) -> int:
    from sft_play.data.documents import documents

    config = load_config(request.config, overrides=request.overrides).config
    return _say(request, documents(config, force=request.force))


def _render(request: Request) -> int:
    from sft_play import pipeline

    loaded = load_config(request.config, overrides=request.overrides)
    return _say(request, pipeline.render(loaded, out=request.out, force=request.force), out=False)


def _preview(request: Request) -> int:
    from sft_play import pipeline

    loaded = load_config(request.config, overrides=request.overrides)
    answer = pipeline.preview(loaded, count=request.n, row=request.row, page=request.out, force=request.force)
    if not request.json and answer.draw(sys.stdout):
        return 0
    return _say(request, answer, out=False)


def _check(request: Request) -> int:
    from sft_play import pipeline

    hardware = _machine(request)
    return _say(request, pipeline.check(request.config, request.overrides, hardware))


def _full_pipeline(request: Request) -> int:
    from sft_play import pipeline

    hardware = _machine(request)
    answer = pipeline.full_pipeline(
        request.config, request.overrides, hardware, style=request.style, force=request.force
    )
    return _say(request, answer)


def _mask_score(request: Request) -> int:
    if request.templates is None or request.tokenizer is None:
        raise ConfigError(
            "mask-score needs both: make mask-score TEMPLATES=FOLDER TOKENIZER=FOLDER OUT=score.json (a folder of "
            ".jinja files, and the folder or hub id of a tokenizer)"
        )
    from sft_play.data.score import score

    return _say(request, score(request.templates, request.tokenizer))


def _generate(request: Request) -> int:
    from sft_play.config.reference import write_generated
    from sft_play.starter.files import write

    for path in [*write_generated(Path.cwd()), *write(Path.cwd())]:
        logger.info("wrote %s", path)
    return 0


_COMMANDS = {
    "gpu-info": _gpu_info,
    "gpu-selftest": _gpu_selftest,
    "memory-check": _memory_check,
    "train": _train,
    "resume": _resume,
    "train-distributed": _launch,
    "train-deepspeed": _launch,
    "launch-command": _launch,
    "setup-accelerate": _setup_accelerate,
    "plan": _plan,
    "memory-model-score": _memory_model_score,
    "verify-layouts": _verify_layouts,
    "tensorboard": _tensorboard,
    "tb-open": _tb_open,
    "tb-stop": _tb_stop,
    "tb-clean": _tb_clean,
    "doctor": _doctor,
    "consolidate": _consolidate,
    "process": _process,
    "style": _style,
    "dapt-docx": _dapt_docx,
    "render": _render,
    "preview": _preview,
    "check": _check,
    "full-pipeline": _full_pipeline,
    "mask-score": _mask_score,
    "run-notebook": _run_notebook,
    "generate": _generate,
}
