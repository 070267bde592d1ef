"""`new`: the run YAML of a model and data, or of another tool's file."""

import contextlib
import functools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from sft_play.commands.request import CommandResult, Request, requested_hardware
from sft_play.config.load import config_from_text
from sft_play.config.translated import format_run_yaml, translate_file
from sft_play.config.yaml_io import JsonValue, nest_values, parse_yaml_value, read_text, walk_leaves
from sft_play.data.checks import missed_column_lines
from sft_play.data.infer_dataset import (
    CountImageTokens,
    CountTokens,
    estimate_image_tokens,
    estimate_tokens,
    infer_dataset,
)
from sft_play.data.masks.image_processor import ImageProcessorSource, cached_image_processor
from sft_play.errors import ConfigError, HardwareError, SftPlayError
from sft_play.files import atomic
from sft_play.launch.planning import plan_run, require_capable_machine
from sft_play.launch.run_hardware import go_offline_without_hub
from sft_play.log import one_line, redact
from sft_play.models.config_json import find_model_folder, load_config_json
from sft_play.planner.explain import long_cpu_warnings
from sft_play.runs.folder import read_json
from sft_play.trace.confirm import load_run_model_shape
from sft_play.variables import spell_commands

_MODES_BY_PREFERENCE = ("lora", "qlora")
EXAMPLE_IMAGE_BASE = "Qwen/Qwen2.5-VL-3B-Instruct"
# lines for the file's head, settings, comments below them
_RunYaml = tuple[list[str], Mapping[str, JsonValue], list[str]]


def run_new(request: Request) -> CommandResult:
    """Write the run YAML, after it has been loaded once, and show it."""
    required = {"MODEL=owner/name (or a folder)": request.model, "DATA=my.jsonl": request.data}
    missing = " and ".join(example for example, value in required.items() if value is None)
    if request.from_ is None and missing:
        raise ConfigError(
            f"make new needs {missing}; or FROM=their.yaml, a file of axolotl, LLaMA-Factory,"
            " ms-swift, torchtune, TRL or Unsloth"
        )
    out = request.out or Path(_default_file_name(request))
    if out.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(
            f"OUT={one_line(str(out))}: a run YAML's name ends with .yaml:"
            f" OUT={one_line(str(out))}.yaml"
        )
    if out.exists() or out.is_symlink():
        raise ConfigError(
            f"{one_line(str(out))} exists, and is not overwritten;"
            " OUT=another.yaml names another file"
        )
    if not out.parent.is_dir():
        raise ConfigError(
            f"OUT={one_line(str(out))}: the folder {one_line(str(out.parent))} does not exist"
        )
    if request.data and request.data.startswith("hub:"):
        go_offline_without_hub(request.data)
    user_settings = _read_settings(request)
    make_yaml = _translate_file if request.from_ else _infer_run_yaml
    head, settings, comments = make_yaml(request, user_settings)
    text = (
        "\n".join(
            [*(f"# {line}" for line in head), format_run_yaml(settings), *map(redact, comments)]
        ).rstrip()
        + "\n"
    )
    config = config_from_text(text, name=str(out))  # what is written loads
    with contextlib.suppress(SftPlayError):  # data that are named by a registry, or are not here
        missed = missed_column_lines(config.data, task_mode=config.task_mode)
        text = "".join([*(f"# {line}\n" for line in missed), text])
    try:
        atomic.write(out, text)
    except OSError as error:
        raise ConfigError(f"OUT={one_line(str(out))} cannot be written: {error.strerror}") from None
    machine = [f"HARDWARE={request.hardware}"] if request.hardware else []
    next_command = spell_commands(shlex.join(["make", "plan", f"CONFIG={out}", *machine]))
    return CommandResult(
        {"ok": True, "path": str(out), "settings": settings, "next": next_command},
        [*text.rstrip("\n").splitlines(), "", f"Written to {out}", f"Next: {next_command}"],
        is_written_to_out=False,
    )


def _default_file_name(request: Request) -> str:
    source = request.data if request.from_ is None else f"{request.from_.stem}_sft_play"
    # of a glob, the folder before it; of a data set of the hub, its name
    base_path = re.split(r"[*?\[]", source.removeprefix("hub:"))[0].rstrip("/")
    name = base_path.rpartition("/")[2].partition(":")[0]
    stem = re.sub(
        r"(\.(jsonl?|ndjson|csv|tsv|parquet|pq|arrow|txt|md|gz))+$", "", name, flags=re.IGNORECASE
    )
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', stem).strip('._-') or 'run'}.yaml"


# The settings of SET by their dotted paths; an error for those that there are not.
def _read_settings(request: Request) -> dict[str, JsonValue]:
    config_from_text("model: {name: any}", name="the run YAML", overrides=request.overrides)
    words = (word.partition("=") for word in request.overrides)
    tree = nest_values(
        {path.strip(): parse_yaml_value(text, name=f"SET {path}") for path, _, text in words}
    )
    return {".".join(map(str, path)): value for path, value in walk_leaves(tree) if path}


def _translate_file(request: Request, user_settings: Mapping[str, JsonValue]) -> _RunYaml:
    file, settings = request.from_, dict[str, JsonValue]()
    row_format = ""
    if request.model:
        settings["model.name"] = request.model
    if request.data:
        dataset_info = infer_dataset(request.data)
        settings |= {
            path: value
            for path, value in dataset_info.settings.items()
            if re.fullmatch(r"data\.(\w+_path|columns|encoding)", path)
        }
        row_format = dataset_info.format
    settings |= user_settings
    text = read_text(
        file, variable="FROM", expected="a file of axolotl, LLaMA-Factory, TRL or Unsloth"
    )
    result = translate_file(text, name=str(file), user_settings=settings, row_format=row_format)
    if comments := result.comments():
        comments = ["# Not taken from the other file, or taken in another way:", *comments]
    head = (
        f"From {one_line(str(file))}, a file of {result.tool.name}, with its defaults; what is not"
        " set has this toolkit's"
    )
    return [head], result.settings, comments


def _infer_run_yaml(request: Request, user_settings: Mapping[str, JsonValue]) -> _RunYaml:
    folder = find_model_folder(request.model)
    model_settings: dict[str, JsonValue] = {"model.name": request.model}
    qlora_config = config_from_text(
        format_run_yaml({**model_settings, "tuning.mode": _MODES_BY_PREFERENCE[-1]}),
        name="the run YAML",
    )
    dataset_info = infer_dataset(
        request.data,
        count_tokens=_token_counter(folder),
        count_image_tokens=_image_token_counter(request.model),
        max_positions=load_run_model_shape(qlora_config).max_positions,
        columns={
            path.removeprefix("data.columns."): value
            for path, value in user_settings.items()
            if path.startswith("data.columns.")
        },
    )
    settings = {**model_settings, **dataset_info.settings}
    # what was inferred for others than these
    for prefix, inferred in (("data.val_", "val_fraction"), ("train.", "effective_batch_size")):
        if any(path.startswith(prefix) for path in user_settings):
            settings.pop(f"{prefix.partition('.')[0]}.{inferred}", None)
    if dataset_info.is_chat and folder is not None:
        template_files = [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates")]
        if not template_files and not read_json(folder / "tokenizer_config.json").get(
            "chat_template"
        ):
            settings["data.chat_template"] = "chatml"
    settings |= user_settings
    mode_reason = "as SET says"
    if "tuning.mode" not in user_settings:
        settings["tuning.mode"], mode_reason = _select_mode(request, settings)
    head = [f"{one_line(request.data)}: {dataset_info.description}", f"tuning.mode: {mode_reason}"]
    if dataset_info.has_images and not _takes_images(request.model):
        head.append(
            f"images: {one_line(request.model)} is a model of text and takes none; give MODEL= an"
            f" image-text base, such as {EXAMPLE_IMAGE_BASE}"
        )
    return head, settings, []


def _takes_images(model: str) -> bool:
    return "vision_config" in load_config_json(model)


# Asked only where rows have images: it loads the base's processor.
def _image_token_counter(model: str) -> CountImageTokens:
    @functools.cache
    def load_counter() -> CountImageTokens:
        with contextlib.suppress(SftPlayError):
            if _takes_images(model):
                location = find_model_folder(model) or model
                return cached_image_processor(ImageProcessorSource(str(location))).count_tokens
        return estimate_image_tokens

    return lambda width, height: load_counter()(width, height)


# The first mode that fits without offload, else the first that fits; and why.
def _select_mode(request: Request, settings: Mapping[str, JsonValue]) -> tuple[str, str]:
    hardware = requested_hardware(request)
    machine_text = request.hardware or "this machine"
    reason = f"nothing fits {machine_text}; make plan shows what would"
    answers: dict[bool, tuple[str, str]] = {}  # by whether a part of it is in RAM
    for mode in _MODES_BY_PREFERENCE:
        config = config_from_text(
            format_run_yaml({**settings, "tuning.mode": mode}), name="the run YAML"
        )
        try:
            plan = plan_run(config, hardware, include_suggestions=False)
            if plan.fits:
                notes = long_cpu_warnings(plan)
                try:
                    require_capable_machine(config, hardware)
                except HardwareError as error:
                    notes = [f"but a run here would stop: {error}"]
                notes.insert(0, f"{mode} fits {machine_text}{plan.choice.ram_text}")
                answer = mode, ", ".join(one_line(note, limit=400) for note in notes)
                answers.setdefault(plan.choice.offloads, answer)
        except SftPlayError as error:
            reason = f"no plan was made for {machine_text}: {one_line(str(error))}"
    return (
        answers.get(False)
        or answers.get(True)
        or (_MODES_BY_PREFERENCE[-1], f"{_MODES_BY_PREFERENCE[-1]}, but {reason}")
    )


def _token_counter(folder: Path | None) -> CountTokens:
    if folder is not None:
        from tokenizers import Tokenizer

        # tokenizers raises plain Exception, also of a file that is missing; loading it again says
        # what is wrong
        with contextlib.suppress(Exception):
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
    return estimate_tokens
