"""What can be refused without torch and transformers is refused without them, in every command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import load_config, resolved_config
from sft_play.models.config_json import base_weights_identity
from sft_play.runs.folder import MANIFEST_FORMAT
from sft_play.starter import BASE_NAME, BASES
from tests.command_cases import COMMAND_CASES
from tests.conftest import ROOT, clean_environment

RUN, HALF, CONFIG = "outputs/one", "outputs/half", "my.yaml"
GGUF = (("./gguf/model.Q4_K_M.GGUF", "is"), ("gguf/model.Q4_K_M.GGUF", "is"), ("./gguf", "holds"))
STARTING = ("train", "train-distributed", "train-deepspeed", "launch-command")
PLANNED = (*STARTING, "plan", "check", "render", "preview", "process", "style", "full-pipeline", "dapt-docx", "bench")
OF_A_RUN = (
    *("chat", "infer", "serve", "eval", "ship", "report", "reproduce", "merge", "merge-test", "export", "export-test"),
    *("push", "consolidate"),
)


def case(command: str, said: str = "", **variables: str) -> tuple[str, dict[str, str], str]:
    return command, variables, said


CASES = [
    *[case(one, "nope.yaml", CONFIG="nope.yaml") for one in (*PLANNED, "resume")],
    *[case(one, "train.banana", CONFIG=CONFIG, SET="train.banana=1") for one in (*PLANNED, "resume")],
    *[case(one, "/nope", CONFIG=CONFIG, SET="model.name=/nope") for one in (*STARTING, "plan", "render", "preview")],
    *[case(one, "/nope", CONFIG=CONFIG, SET="data.train_path=/nope.jsonl") for one in (*STARTING, "render", "preview")],
    *[case(one, "is not a folder", CONFIG=CONFIG, OUT="my.yaml/x.json") for one in ("plan", "check", "doctor")],
    *[case(one, "OUT=", RUN=RUN, OUT="my.yaml/x") for one in ("merge", "eval", "ship", "report", "export-test")],
    *[case(one, "nope", RUN="nope", **more) for one in OF_A_RUN for more in [
        {"infer": {"INPUT": "asked.txt", "OUTPUT": "x.jsonl"}, "export": {"FORMAT": "gguf"}, "push": {"REPO": "a/b"}}
        .get(one, {})]],
    case("infer", "INPUT=prompts.txt (or .jsonl) and OUTPUT=answers.jsonl", RUN=RUN),
    case("infer", "nope", RUN=RUN, INPUT="nope", OUTPUT="x.jsonl"), case("push", "REPO=user/name", RUN=RUN),
    case("push", "names no user and repository", RUN=RUN, REPO="nobody"), case("export", "FORMAT=", RUN=RUN),
    case("export", "QUANT=q9", RUN=RUN, FORMAT="gguf", QUANT="q9"), case("merge", "DTYPE=int8", RUN=RUN, DTYPE="int8"),
    case("merge", "BASE=x", RUN=RUN, BASE="x"), case("merge-test", "", RUN=RUN),
    case("eval", "nope", RUN=RUN, DATA="nope"), case("ship", "nope", REPLAY="nope"),
    case("serve", "PORT", RUN=RUN, PORT="99999"), case("serve", "ENGINE", RUN=RUN, ENGINE="banana"),
    case("consolidate", "RUN= names no run"), case("compare", "RUNS="), case("compare", "nope", RUNS="nope other"),
    case("prune", "RUNS="), case("resume", "", CONFIG=CONFIG), case("preview", "", CONFIG=CONFIG, ROW="0"),
    case("new", "MODEL=owner/name"), case("new", "/nope", MODEL="/nope", DATA="asked.txt"),
    case("new", "nope", MODEL="base", DATA="nope.jsonl"), case("new", "nope", FROM="nope.yaml"),
    case("process", "nope", CONFIG=CONFIG, SET="data.process.raw_path=nope"), case("dapt-docx", "", CONFIG=CONFIG),
    case("style", "", CONFIG=CONFIG), case("mask-score", "TEMPLATES="), case("memory-model-score", "PEAKS="),
    case("verify-layouts", "banana", LAYOUTS="banana"), case("run-notebook", "NOTEBOOK"),
    case("memory-check", "nope", RUN="nope"), case("doctor", "HARDWARE", HARDWARE="1xH100"),
    case("launch-file", "FOR=", CONFIG=CONFIG),
    *[case(one, "banana", CONFIG=CONFIG, STRATEGY="banana") for one in ("train-distributed", "launch-command")],
    case("plan", "banana", CONFIG=CONFIG, HARDWARE="banana"), case("plan", "banana", CONFIG=CONFIG, MAX="banana"),
    case("sweep", "SET lists no values", CONFIG=CONFIG),
    case("sweep", "nope.yaml", CONFIG="nope.yaml", SET="train.learning_rate=1e-4,2e-4"),
    case("sweep", "train.banana", CONFIG=CONFIG, SET="train.banana=1,2"),
    case("sweep", "/nope", CONFIG=CONFIG, SET="train.learning_rate=1e-4,2e-4 model.name=/nope"),
    *[case("launch-file", said, FOR="slurm", **more) for said, more in [
        ("nope.yaml", {"CONFIG": "nope.yaml"}), ("train.banana", {"CONFIG": CONFIG, "SET": "train.banana=1"})]],
    *[case(one, "exists", RUN=RUN, OUT="base") for one in ("merge", "consolidate")],
    case("export", "/nope", RUN=RUN, FORMAT="gguf", LLAMA_CPP="/nope"), case("export-test", "", RUN=RUN),
    case("infer", "is not a regular file", RUN=RUN, INPUT="/dev/null", OUTPUT="x.jsonl"),
    case("infer", "", RUN=RUN, INPUT="asked.txt", OUTPUT="base"),
    case("infer", "", RUN=RUN, INPUT="asked.txt", OUTPUT="my.yaml/x.jsonl"),
    case("eval", "banana", RUN=RUN, SPLIT="banana"), case("ship", "", RUN=RUN, LIMIT="0"),
    case("chat", "", RUN=RUN, TEMPERATURE="hot"), case("push", "token", RUN=RUN, REPO="a/b"),
    *[case("push", said, RUN=f"outputs/{run}", REPO="a/b", MERGED="1") for run, said in [
        ("one", "holds no merged model"), ("stale", "holds no merged model of this adapter"),
        ("failed", "is not the trained model: merge-test found it 9 nats"), ("merged", "token")]],
    *[case(one, said, CONFIG=CONFIG, SET=f"data.train_path={name}") for one in (*STARTING, "render", "preview")
      for said, name in (("no rows", "empty.jsonl"), ("not JSON", "asked.dat"))],
    case("train-deepspeed", "nope.json", CONFIG=CONFIG, DEEPSPEED_CONFIG="nope.json"),
    *[case(one, "/nope", CONFIG=CONFIG, SET="model.adapter=/nope") for one in (*STARTING, "plan")],
    *[case(one, "my.yaml", CONFIG=CONFIG, SET="output.dir=my.yaml") for one in STARTING[:2]],
    *[case(one, "exists", CONFIG=CONFIG, SET="output.name=one") for one in STARTING[:2]],
    *[case(one, "../esc", CONFIG=CONFIG, SET="output.name=../esc") for one in STARTING],
    *[case(one, "pipe", CONFIG=CONFIG, SET="output.dir=pipe") for one in STARTING[:2]],
    *[case(one, "broken.parquet", CONFIG=CONFIG, SET="data.train_path=broken.parquet") for one in STARTING],
    *[case(one, "trackio is not installed", CONFIG=CONFIG, SET="train.report_to=[trackio]") for one in STARTING[:2]],
    *[case(one, "/no-unsloth", CONFIG=CONFIG, SET="tuning.backend=unsloth", UNSLOTH_VENV="/no-unsloth")
      for one in ("plan", "train", "train-distributed")],
    *[case("resume", "train.learning_rate: the run has 0.001, now 0.5", RUN=run, SET="train.learning_rate=0.5", **more)
      for run in ("half", HALF) for more in ({}, {"CONFIG": CONFIG})],
    case("resume", "tuning.lora.alpha: the run has 32, now 7", CONFIG="other.yaml", RUN="half"),
    case("resume", "there is no run nope in outputs", RUN="outputs/nope"),
    *[case(one, f"model path {name} {is_one} a GGUF, weights for llama.cpp", CONFIG=CONFIG, SET=f"model.name={name}")
      for one in ("plan", "train", "train-distributed") for name, is_one in GGUF],
    *[case("new", f"model path {name} {is_one} a GGUF", MODEL=name, DATA="rows.jsonl") for name, is_one in GGUF],
    *[case(name, said, **variables) for name, row in COMMAND_CASES.items() for said, variables in row.refusals],
]  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What each case says, and the folder in which it was asked, with a run that has finished."""
    folder = tmp_path_factory.mktemp("refusals")
    base = shutil.copytree(BASES[BASE_NAME], folder / "base")
    for name in ("asked.txt", "asked.dat"):
        (folder / name).write_text("what is it?\n")
    (folder / "empty.jsonl").touch()
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 30)
    (folder / CONFIG).write_text(
        f"model: {{name: {base}, max_seq_len: 64}}\ntuning: {{mode: lora}}\n"
        "data: {train_path: rows.jsonl}\ntrain: {effective_batch_size: 4, report_to: []}\n"
    )
    run = folder / RUN
    (run / "adapter").mkdir(parents=True)
    (run / "adapter" / "adapter_config.json").write_text("{}")
    (run / "adapter" / "adapter_model.safetensors").touch()
    (run / "config.yaml").write_text((folder / CONFIG).read_text())
    (run / "resolved.json").write_text(json.dumps(resolved_config(load_config(folder / CONFIG).config)))
    manifest = {"format": MANIFEST_FORMAT, "status": "finished", "started": "2026-11-26T00:00:00+00:00"}
    (run / "manifest.json").write_text(json.dumps(manifest | {"ended": manifest["started"], "data": {}}))
    adapter = base_weights_identity(str(run / "adapter"), None)["sha256"]
    records = {"stale": {"adapter_sha256": "another"}, "merged": {"adapter_sha256": adapter},
               "failed": {"adapter_sha256": adapter, "test": {"ok": False, "kl_merged": 9.0}}}  # fmt: skip
    for name, record in records.items():
        merged = shutil.copytree(run, folder / "outputs" / name) / "merged"
        merged.mkdir()
        (merged / "config.json").write_text("{}")
        (merged / "merge.json").write_text(json.dumps(record))
    half = folder / HALF  # stopped after a step; a part of its settings was given in SET
    given = ("train.learning_rate=0.001", "tuning.lora.r=4")
    half.mkdir(parents=True)
    settings = resolved_config(load_config(folder / CONFIG, overrides=given).config)
    (half / "resolved.json").write_text(json.dumps(settings))
    own_config = shutil.copy(folder / CONFIG, folder / "half.yaml")
    manifest |= {"status": "stopped", "overrides": given, "config_path": str(own_config)}
    (half / "manifest.json").write_text(json.dumps(manifest))
    (half / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    text = (folder / CONFIG).read_text()
    (folder / "other.yaml").write_text(text.replace("mode: lora", "mode: lora, lora: {alpha: 7}"))
    (folder / "gguf").mkdir()
    (folder / "gguf" / "model.Q4_K_M.GGUF").write_bytes(b"GGUF" + bytes(100))
    os.mkfifo(folder / "pipe")
    (folder / "broken.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    return asked_of(CASES, folder), folder


def asked_of(cases: list[tuple[str, dict[str, str], str]], folder: Path) -> list[dict[str, Any]]:
    """What became of each case, in one process that has no heavy library."""
    words = [{"words": [command], "set": variables} for command, variables, _ in cases]
    environment = clean_environment(SFT_PLAY_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT))
    asked = subprocess.run(
        [sys.executable, "-m", "tests.refusals"], input=json.dumps(words), capture_output=True, text=True, cwd=folder,
        env=environment, timeout=280, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in asked.stdout.splitlines()]


def test_it_is_refused_without_the_libraries(answers):
    assert len(answers[0]) == len(CASES) > 130
    wrong = []
    for (command, variables, said), answer in zip(CASES, answers[0], strict=True):
        if answer["loaded"] or answer["code"] != 2 or said not in answer["said"] or "Traceback" in answer["said"]:
            wrong.append((command, variables, answer["code"], answer["loaded"], answer["said"][-300:]))
    assert wrong == []


def test_every_command_that_can_refuse_is_asked():
    assert {command for command, _, _ in CASES} == {name for name, row in COMMAND_CASES.items() if row.can_refuse}


def test_a_command_that_goes_on_is_stopped_where_it_would_load_a_library(answers):
    found = asked_of([("render", {"CONFIG": CONFIG}, "")], answers[1])
    assert [(one["code"], one["loaded"]) for one in found] == [(-1, "transformers")]
