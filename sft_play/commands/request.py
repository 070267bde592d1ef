"""The request to a command: words, flags and make's variables, read once, with an error where they
are wrong; and what it is about, looked up: the machine, the folder of the runs, a finished run,
data that a variable names. And the answer, lines and JSON of one object, and where they are
written."""

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sft_play.answers import Answer
from sft_play.commands import COMMAND_FILES, INTERNAL_COMMANDS, help_line
from sft_play.config.load import load_config, split_overrides
from sft_play.config.options import sections
from sft_play.config.schema import ModelConfig, OutputConfig
from sft_play.config.yaml_io import parse_yaml_value
from sft_play.data.sources.files import find_source, list_parts
from sft_play.errors import ConfigError, DataError, RunFolderError, SftPlayError
from sft_play.exit_codes import add_exit_status, write_json_line
from sft_play.files import relative_to_cwd
from sft_play.finished.run import FinishedRun, find_finished_run
from sft_play.launch.request import LaunchOptions, parse_launch_options
from sft_play.launch.torchrun import NODE_VARIABLES, node_variables, rank_variables
from sft_play.log import escape_control, one_line, redact
from sft_play.machine.hardware import Hardware, detect_hardware, parse_hardware
from sft_play.runs.folder import write_json
from sft_play.runs.lookup import output_dir, resolve_run
from sft_play.spelling import did_you_mean
from sft_play.starter import CONFIG, find_starter_file
from sft_play.variables import (
    DESCRIBING_COMMANDS,
    EXTRA_FLAGS,
    TARGET_HINTS,
    TRAINING_COMMANDS,
    VARIABLES,
    flag_commands,
    is_makefile_near,
    spell_commands,
)

logger = logging.getLogger(__name__)

# Fields of answers that advise, and may name commands.
ADVICE_FIELDS = ("remedy", "reasons", "ways_out", "refused_because")


@dataclasses.dataclass(frozen=True)
class Request:
    """The request to a command; its words win over make's variables in the environment. `values`:
    those of make's variables, read by the kind that `variables.json` says; `request.run` is
    RUN's."""

    command: str
    config: Path
    overrides: tuple[str, ...] = ()
    is_config_given: bool = False
    # Whether `config` is the one that the folder of the run names, and not the user.
    is_config_recorded: bool = False
    options: LaunchOptions = dataclasses.field(default_factory=LaunchOptions)
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """The value of a variable of make, by its name in small letters (`for_`, `from_`: those are
        Python's words); None, False or () where it is not given."""
        variable_name = name.rstrip("_").upper()
        if variable_name not in VARIABLES:
            raise AttributeError(f"there is no variable {variable_name} of make")
        return self.values.get(variable_name, _parse_variable_value(variable_name, None))


def read_request(argv: Sequence[str], environment: Mapping[str, str]) -> Request:
    """Read a command line. Raises ConfigError for words that are not understood."""
    command_name = next(
        (word for word in argv if word in (*COMMAND_FILES, *INTERNAL_COMMANDS)), None
    )
    # intermixed: key=value words may stand before, between and after flags; unknown flags get a
    # message of our own
    parsed, unknown = _build_parser(command_name).parse_known_intermixed_args(list(argv))
    if parsed.command not in (*COMMAND_FILES, *INTERNAL_COMMANDS):
        hint = (
            TARGET_HINTS.get(parsed.command.lower().replace("_", "-"))
            or did_you_mean(parsed.command, COMMAND_FILES)
            or f"there are: {', '.join(COMMAND_FILES)}"
        )
        raise ConfigError(f"there is no command {escape_control(parsed.command)}; {hint}")
    _check_flags(parsed, unknown)
    # the last of several values of a key counts: words win over short flags, and these over SET
    # a rank's words repeat SET, which it also inherits
    set_text = "" if parsed.command == "rank" else environment.get("SET", "")
    flag_overrides = []
    for flag, row in EXTRA_FLAGS.items():
        value = getattr(parsed, flag[2:].replace("-", "_"))
        if "setting" in row and value is not None:
            # it may begin like a number, or have a colon
            is_path = "path" in row["setting"] or "dir" in row["setting"]
            flag_overrides.append(f"{row['setting']}={json.dumps(value) if is_path else value}")
    overrides = (*split_overrides(set_text), *flag_overrides, *parsed.overrides)
    launch_values, notes = _launch_values(parsed, environment)
    refuse_make_variables(overrides)
    if overrides and parsed.command not in flag_commands("SET"):
        raise ConfigError(
            f"{parsed.command} reads no run YAML, so {one_line(overrides[0])} would change nothing"
        )
    typed_config = _variable_text(parsed, environment, "CONFIG")
    config = typed_config or _recorded_config(parsed, environment)
    request = Request(
        command=parsed.command,
        config=_config_path(config or CONFIG),
        overrides=overrides,
        is_config_given=config is not None,
        is_config_recorded=config is not None and not typed_config,
        options=parse_launch_options(
            launch_values,
            uses_deepspeed=bool(parsed.deepspeed) or parsed.command == "train-deepspeed",
            uses_tensorboard=bool(parsed.tensorboard),
            notes=notes,
        ),
        values={
            name: _parse_variable_value(name, _variable_text(parsed, environment, name))
            for name, variable in VARIABLES.items()
            if variable.kind not in ("launch", "list") and (variable.has_flag or name == "OUTPUT")
        },
    )
    if not request.is_config_given and request.command in flag_commands("CONFIG"):
        if "CONFIG" in environment:
            raise ConfigError(
                "CONFIG is set and empty (an unset shell variable?): name the run YAML, or unset it"
            )
        plans_model = request.command == "plan" and request.model is not None
        if request.command in (*TRAINING_COMMANDS, *DESCRIBING_COMMANDS) and not plans_model:
            require_config_for_model_and_data(request)
    return request


def _recorded_config(parsed: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """Find the run YAML that a run to be resumed was started with: `make resume RUN=name` needs no
    CONFIG. Raises RunFolderError where there is neither such a run nor a starter that it could be a
    run of."""
    run = _variable_text(parsed, environment, "RUN")
    if run is None or parsed.command != "resume" or "CONFIG" in environment:
        return None
    try:
        folder = resolve_run(Path(OutputConfig().dir), run)
    except RunFolderError:
        if Path(CONFIG).is_file():
            return None
        raise
    files = (str(folder.read_manifest().get("config_path")), str(folder.path / "config.yaml"))
    return next((file for file in files if Path(file).is_file()), None)


def _config_path(text: str) -> Path:
    """Find the run YAML that CONFIG names: a path, or the name of a file in configs/, with or
    without its ending."""
    path = relative_to_cwd(Path(os.path.expanduser(text)))  # noqa: PTH111  (no error for ~nobody)
    # os.path says no of a name that is too long, where Path raises
    if os.path.isfile(path) or os.path.isfile(path.with_suffix(".yaml")):  # noqa: PTH113
        return path
    if path.name != text:
        return find_starter_file(path) or path
    shipped = Path("configs") / (text if path.suffix in (".yaml", ".yml") else f"{text}.yaml")
    return shipped if os.path.isfile(shipped) else path  # noqa: PTH113


def _variable_text(
    parsed: argparse.Namespace, environment: Mapping[str, str], name: str
) -> str | None:
    flag = getattr(parsed, name.lower()) if VARIABLES[name].has_flag else None
    return "1" if flag is True else flag or environment.get(name) or None


def _parse_variable_value(name: str, text: str | None) -> Any:
    variable = VARIABLES[name]
    if variable.kind == "switch":
        return text not in (None, "0")
    if variable.kind == "names":
        return tuple(part for part in re.split(r"[\s,]+", text or "") if part)
    if text is None:
        return None
    if variable.kind == "path":
        return Path(os.path.expanduser(text))  # noqa: PTH111  (no error for ~nobody)
    if variable.kind == "count":
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 1_000_000_000):
            raise ConfigError(
                f"{name}={one_line(text)} is not a"
                f" number of {variable.counted_noun}, such as {name}=4"
            )
        return int(text)
    if variable.kind == "number":
        is_money = "money" in variable.counted_noun
        amount = (
            re.sub(r"^\$|(\$| ?usd)$", "", text.strip(), flags=re.IGNORECASE) if is_money else text
        )
        if name == "BUDGET" and amount == "0":
            raise ConfigError(
                "BUDGET=0 pays for nothing; a shell reads $20 as $2 and 0: write BUDGET=20"
            )
        if not re.fullmatch(
            r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,2})?", amount, re.IGNORECASE
        ):
            raise ConfigError(
                f"{name}={one_line(text)} is not {variable.counted_noun}, such as"
                f" {name}={variable.example}"
            )
        return float(amount)
    return text


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{escape_control(message)}; see sft-play --help")


def _build_parser(command: str | None) -> argparse.ArgumentParser:
    description = "Plan, explain and run supervised fine-tuning."
    commands: str | None = "commands: " + "; ".join(
        f"{name}: {help_line(name)}" for name in COMMAND_FILES
    )
    if command is not None:
        description, commands = help_line(command), None
    parser = _Parser(prog="sft-play", description=description, epilog=commands, allow_abbrev=False)
    parser.add_argument("command", help=", ".join(COMMAND_FILES))
    rows = [
        (
            f"--{name.lower()}",
            (variable.help + f" (make: {name}={variable.example})" * is_makefile_near()).replace(
                "%", "%%"
            ),
            variable.kind,
        )
        for name, variable in VARIABLES.items()
        if variable.has_flag
    ]
    rows += [
        (flag, row["help"] or argparse.SUPPRESS, "switch" * ("switch" in row))
        for flag, row in EXTRA_FLAGS.items()
    ]
    commands_by_flag = flag_commands_table()
    for flag, text, kind in rows:
        if command is not None and command not in commands_by_flag[flag]:
            text = argparse.SUPPRESS
        # deepspeed's launcher passes --local_rank
        spellings = dict.fromkeys((flag, flag.replace("_", "-")))
        parser.add_argument(
            *spellings,
            help=text,
            default=None,
            action="store_true" if kind == "switch" else "store",
        )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides of the run YAML (make: SET)"
    )
    return parser


def flag_commands_table() -> dict[str, Sequence[str]]:
    """Every flag with the commands that take it."""
    variable_flags = {
        f"--{name.lower()}": flag_commands(name)
        for name, variable in VARIABLES.items()
        if variable.has_flag
    }
    return {**variable_flags, **{flag: row["for"] for flag, row in EXTRA_FLAGS.items()}}


def _check_flags(parsed: argparse.Namespace, unknown: Sequence[str]) -> None:
    command, flags = parsed.command, flag_commands_table()
    if unknown:
        flag = unknown[0].partition("=")[0]
        hint = did_you_mean(
            flag, [name for name, commands in flags.items() if command in commands], list(flags)
        )
        raise ConfigError(
            f"{command} has no flag {one_line(flag)};"
            f" {hint or f'sft-play {command} --help lists its flags'}"
        )
    for flag, commands in flags.items():
        value = getattr(parsed, flag[2:].replace("-", "_"))
        if value is None:
            continue
        if command not in commands:
            owners = [name for name in commands if name not in INTERNAL_COMMANDS]
            raise ConfigError(
                f"{flag} is not a flag of {command}; it belongs to {', '.join(owners)}"
            )
        if isinstance(value, str) and not value.strip():
            raise ConfigError(
                f"{flag} is given and empty (an unset shell variable?): give a value,"
                " or leave it out"
            )


def _launch_values(
    parsed: argparse.Namespace, environment: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Read how to launch the run, from flags, make's variables and what a scheduler exported.
    Returns the values, and log lines about the exported ones. `train` takes several nodes too where
    the environment names them: then each node runs `train`."""
    command = parsed.command
    values = {
        name: getattr(parsed, name.lower(), None) or environment.get(name) or ""
        for name, variable in VARIABLES.items()
        if variable.kind == "launch" and command in flag_commands(name)
    }
    # by flag only: a rank's words repeat what its parent's environment said
    if command in ("train", "rank"):
        values["DEEPSPEED_CONFIG"] = parsed.deepspeed_config or ""
    if command not in (*TRAINING_COMMANDS, "doctor") or rank_variables(environment):
        return values, ()
    exported, notes = node_variables(
        {**environment, **{name: text for name, text in values.items() if text}}
    )
    if command == "train":
        node_values = {
            name: environment.get(name, "").strip() or exported.get(name, "")
            for name in (*NODE_VARIABLES, "NPROC", "EXPORTED")
        }
        return (
            (values | node_values, notes)
            if node_values["NNODES"] not in ("", "1")
            else (values, ())
        )
    return values | {name: text for name, text in exported.items() if not values.get(name)}, notes


def require_config_for_model_and_data(request: Request) -> None:
    """Raise ConfigError where overrides give a model or data but no config is given: the starter
    has its own."""
    if request.is_config_given or not request.overrides:
        return
    starter = load_config(request.config).config
    requested = load_config(request.config, overrides=request.overrides).config
    for key in (
        "model.name",
        "data.sources",
        "data.train_path",
        "data.val_path",
        "data.test_path",
        "data.text_path",
        "task_mode",
    ):
        starter_value, value = (
            functools.reduce(getattr, key.split("."), config) for config in (starter, requested)
        )
        if not value or value == starter_value:
            continue
        # the file to write has the user's own model and rows, or examples
        name, rows = requested.model.name, requested.data.train_path
        name = "Qwen/Qwen2.5-0.5B-Instruct" if name == starter.model.name else name
        rows = "my.jsonl" if rows in (None, starter.data.train_path) else rows
        raise ConfigError(
            f"{key}={one_line(str(value))} is given without a run YAML, and without CONFIG"
            f" {request.command} uses the starter, a model of two million parameters with its own"
            " rows and settings. Write my.yaml:\n  model: {name:"
            f" {one_line(json.dumps(name, ensure_ascii=False))}, max_seq_len: 1024}}\n  data:"
            f" {{train_path: {one_line(json.dumps(rows, ensure_ascii=False))}, val_fraction:"
            f" 0.05}}\nand name it: make {request.command} CONFIG=my.yaml"
        )


def refuse_make_variables(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a variable of make, or a file, among the settings of the run YAML."""
    for word in overrides:
        key, equals, text = word.partition("=")
        name = key.upper()
        if not equals and word.lower().endswith((".yaml", ".yml")):
            flag = f"--config {shlex.quote(one_line(word))}"
            raise ConfigError(
                f"{one_line(word)} is not key=value, such as train.epochs=1;"
                f" to name a run YAML: {flag}"
            )
        # `output={dir: x}` is a section of the run YAML
        if name in VARIABLES and key not in sections():
            flag = f", or as --{name.lower()}" if VARIABLES[name].has_flag else ""
            if flag and VARIABLES[name].kind != "switch":
                flag += f" {shlex.quote(one_line(text))}"
            remedy = f"give it to make (make plan {name}=...), or in the environment{flag}"
            raise ConfigError(f"{one_line(word)} is a variable of make, not a setting: {remedy}")


def command_line(
    request: Request, command: str, settings: Sequence[str], *, before: Sequence[str] = ()
) -> str:
    """Return the command line that runs a command with the config of this request, after the words
    `before`."""
    config, run = request.is_config_given and request.config, command == "resume" and request.run
    variables = {"CONFIG": config, "RUN": run, "SET": shlex.join(settings)}
    words = (f"{name}={text}" for name, text in variables.items() if text)
    return spell_commands(shlex.join([*before, "make", command, *words]))


# --- what a request is about ----------------------------------------------------------------------


def requested_hardware(request: Request) -> Hardware:
    """Return the machine to plan for, with the price that was given."""
    hardware = parse_hardware(request.hardware) if request.hardware else detect_hardware()
    if request.price is not None:
        hardware = dataclasses.replace(hardware, price_per_gpu_hour=request.price)
    return hardware


def refuse_hardware(request: Request) -> None:
    """Raise ConfigError where a machine is named, for a command that uses this one."""
    if request.hardware:
        raise ConfigError(
            f"HARDWARE={escape_control(request.hardware)} names a machine for make plan; training"
            " uses this machine"
        )


def request_output_dir(request: Request) -> Path:
    """Return the folder of the run folders."""
    return output_dir(
        load_config(request.config, overrides=request.overrides, with_adapter=False).config.output
    )


def find_request_run(request: Request) -> FinishedRun:
    """Find the finished run that RUN names, or the newest. Raises what `find_finished_run`
    raises."""
    return find_finished_run(
        request_output_dir(request), request.run, is_trusted=functools.partial(trusts_code, request)
    )


def require_source(path: Path | str, variable_name: str) -> None:
    """Raise DataError where a variable names data that are not there, before anything is imported
    to read them."""
    try:
        list_parts(find_source(str(path)), wants_text=True)
    except DataError as error:
        raise DataError(f"{variable_name}={error}") from None


def trusts_code(request: Request, model: ModelConfig, key: str) -> bool:
    """True if the user allows the code that `model.KEY` would run: SET gives the same value, or the
    given CONFIG does, for the same model and revision."""
    path, required_value = f"model.{key}", getattr(model, key)
    for word in reversed(request.overrides):
        name, _, value = word.partition("=")
        if name.strip() == path:
            return bool(parse_yaml_value(value, name=path) == required_value)
    if not request.is_config_given or request.is_config_recorded:
        return False
    config_model = load_config(
        request.config, overrides=request.overrides, with_adapter=False
    ).config.model
    is_same_model = (config_model.name, config_model.revision) == (model.name, model.revision)
    return is_same_model and bool(getattr(config_model, key) == required_value)


# --- a command's answer: lines and JSON of one object, and where they are written -----------------


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """A command's answer. `lines` are logged one by one, `data` is the JSON.

    `error`: an error that is raised after the lines; with JSON=1 only its exit code is used.
    `is_written_to_out`: whether OUT names the file for this JSON; False where the command writes
    OUT itself.
    """

    data: Any
    lines: Sequence[str] = ()
    exit_code: int = 0
    error: SftPlayError | None = None
    is_written_to_out: bool = True


def command_result(answer: Answer, *, is_written_to_out: bool = True) -> CommandResult:
    """Turn an answer into a command's result, with exit code 2 where the answer is not ok."""
    exit_code = 0 if answer.ok else ConfigError.exit_code
    return CommandResult(
        answer.as_json(),
        ["\n".join(answer.lines())],
        exit_code,
        is_written_to_out=is_written_to_out,
    )


def confirm_with_user(request: Request, question: str, *, refusal: str) -> bool:
    """Ask the user; True if they agree, at the terminal or by YES=1 (no answer is a no). Raises
    ConfigError where there is no terminal to ask on, or JSON=1 was given: `refusal` says what would
    be done."""
    if request.yes:
        return True
    if request.json or sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(f"{refusal}\nand there is no terminal to ask on: YES=1 agrees")
    try:
        return input(f"{escape_control(question)} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def write_result(result: CommandResult | int, request: Request) -> int:
    """Write an answer to OUT, show it as JSON or in words, and return the exit code. Raises
    ConfigError where OUT cannot be written, and the result's `error`."""
    if isinstance(result, int):
        return result
    exit_code, reason = result.exit_code, None
    if result.error is not None:
        exit_code, reason = result.error.exit_code, error_text(result.error)
    elif exit_code:  # the answer's own fields say what is wrong, and its last line does
        lines = [line.strip() for line in "\n".join(result.lines).splitlines()]
        reasons = [line for line in lines if line and not line.startswith(("Next:", "Written to:"))]
        reason = redact(reasons[-1]) if reasons else f"exit code {exit_code}; the log says why"
    result = dataclasses.replace(result, data=spell_advice(result.data))
    data = add_exit_status(result.data, exit_code, reason)
    if request.out is not None and result.is_written_to_out:
        write_out_file(request.out, data if isinstance(result.data, dict) else result.data)
    if request.json:
        write_json_line(data)
        return exit_code
    for line in result.lines:
        logger.info("%s", line)
    if result.error is not None:
        raise result.error
    return exit_code


def spell_advice(data: Any, *, is_advice: bool = False) -> Any:
    """Write the commands in the advice of an answer's JSON as the user can type them. Other fields
    may quote rows, and stay as they are."""
    if isinstance(data, str) and is_advice:
        return spell_commands(data)
    if isinstance(data, (list, tuple)):
        return [spell_advice(item, is_advice=is_advice) for item in data]
    if not isinstance(data, dict):
        return data
    return {
        key: spell_advice(value, is_advice=is_advice or key in ADVICE_FIELDS)
        for key, value in data.items()
    }


def error_text(error: BaseException) -> str:
    """Return an exception's text for programs, without secrets; its class where it has none."""
    return redact(spell_commands(str(error)) or type(error).__name__)


def require_writable_out(out: Path, variable_name: str = "OUT") -> None:
    """Raise ConfigError where nothing can be written at OUT, before the work whose answer would be
    lost."""
    parents = out.expanduser().absolute().parents
    parent = next(parent for parent in parents if os.path.exists(parent))  # noqa: PTH110
    is_writable = os.access(parent, os.W_OK | os.X_OK) or os.access(out, os.W_OK)
    if not parent.is_dir() or not is_writable:
        reason = "is not writable for this user" if parent.is_dir() else "is not a folder"
        raise ConfigError(
            f"{variable_name}={escape_control(str(out))} cannot be written: {parent} {reason}"
        )


def write_out_file(path: Path, data: Any) -> None:
    """Write JSON to a file (written aside and renamed), or into a device or pipe (`/dev/stdout`).
    Raises ConfigError where it cannot be written."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        else:
            write_json(path.resolve() if path.is_symlink() else path, data)
    except OSError as error:
        raise ConfigError(
            f"OUT={escape_control(str(path))} cannot be written: {error.strerror}"
        ) from None


@contextlib.contextmanager
def redirect_stdout_to_stderr(*, enabled: bool) -> Iterator[None]:
    """Send output of this process, its libraries and its children to standard error inside the
    block: with JSON=1 standard output holds the answer alone."""
    if not enabled:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
