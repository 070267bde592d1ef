"""check, render and the whole way: what they say of good and bad files, and what they leave unwritten."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft_play.answers import Finding
from sft_play.commands.request import CommandResult
from sft_play.commands.rows import full_pipeline, preview, render
from sft_play.config.load import load_config
from sft_play.data.build.splits import build_splits
from sft_play.data.build.stats import TruncationCost, trained_runs
from sft_play.data.sources.files import find_data_paths
from sft_play.diagnose.run_check import CHECK_STATES, CheckReport, check_run
from sft_play.errors import DataError
from sft_play.machine.hardware import detect_hardware, parse_hardware
from tests.bundled import SHARED_SLOWLY, bad_inputs, there, tokenizer_folder
from tests.conftest import chat, write_rows, write_run

SUMS = [chat(f"what is {n} + {n}?", f"it is {2 * n}.") for n in range(40)]


def run_yaml(folder: Path, model: Path | str, **data: Any) -> Path:
    return write_run(folder, Path(model), folder / "train.jsonl", model={"max_seq_len": 128}, data=data)


def checked(config: Path, *words: str) -> CheckReport:
    return check_run(config, words, detect_hardware())


def states(report: CheckReport) -> dict[str, str]:
    """The worst state of each name."""
    order = ["ok", "skipped", "warning", "problem"]
    found: dict[str, str] = {}
    for check in report.findings:
        found[check.name] = max(found.get(check.name, "ok"), CHECK_STATES[check.verdict], key=order.index)
    return found


def one(report: CheckReport, name: str, state: str) -> Finding:
    (found,) = [check for check in report.findings if check.name == name and CHECK_STATES[check.verdict] == state]
    return found


def test_a_template_without_a_generation_prompt_is_warned_of_with_what_to_add(tiny_llama, tmp_path):
    write_rows(tmp_path / "train.jsonl", SUMS[:8])
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (tmp_path / "lost.jinja").write_text(turns)
    config = run_yaml(tmp_path, tiny_llama, chat_template=str(tmp_path / "lost.jinja"))
    said = one(checked(config), "rows: train", "warning").found
    assert r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}" in said


@pytest.mark.parametrize("truncate", ["end", "prompt", "drop"])
def test_answers_that_lose_their_end_are_counted(tiny_llama, tmp_path, truncate):
    """2 of 10 answers are cut in two; with the beginning cut, or the row left out, none is."""
    rows = [*SUMS[:8], *(chat("and then?", "so it goes on " * 60) for _ in range(2))]
    write_rows(tmp_path / "train.jsonl", rows)
    config = run_yaml(tmp_path, tiny_llama, truncate=truncate, max_lost_fraction=1.0)
    found = {check.name: check for check in checked(config).findings}
    is_cut = truncate == "end"
    assert CHECK_STATES[found["end of turn"].verdict] == ("warning" if is_cut else "ok")
    assert ("2 of 10 rows" in found["end of turn"].found) == is_cut


def test_a_good_run_is_ready_and_nothing_is_written(tiny_llama, tmp_path, monkeypatch):
    write_rows(tmp_path / "train.jsonl", SUMS[:30])
    write_rows(tmp_path / "val.jsonl", SUMS[30:])
    config = run_yaml(tmp_path, tiny_llama, val_path=str(tmp_path / "val.jsonl"))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    report = checked(config)
    assert report.ok, "\n".join(report.lines())
    assert sorted(tmp_path.rglob("*")) == before
    found = states(report)
    assert set(found) >= {
        *("config", "model files", "tokenizer", "chat template", "data files", "rows: train", "rows: val", "leaks"),
        *("duplicates", "masks: train", "masks: val", "BOS", "end of turn", "padding token"),
        *("example", "length: train", "padding", "model", "memory plan", "disk"),
    }
    assert not {name for name, state in found.items() if state in ("warning", "problem")}
    assert "verified on every one of 30 rows" in one(report, "masks: train", "ok").found
    assert "[[it" in one(report, "example", "ok").found
    assert report.lines()[-1].startswith("Ready to train: ")


def test_a_missing_model_does_not_hide_bad_rows(tmp_path):
    write_rows(tmp_path / "train.jsonl", [*SUMS, {"messages": [{"role": "asistant", "content": "x"}]}])
    config = run_yaml(tmp_path, tmp_path / "no-such-model")
    report = checked(config)
    found = states(report)
    assert (report.ok, found["model files"], found["rows: train"]) == (False, "problem", "problem")
    assert found["tokenizer"] == found["masks"] == found["model"] == found["disk"] == "skipped"
    assert "train.jsonl:41" in one(report, "rows: train", "problem").found
    assert sum("no-such-model does not exist" in check.found for check in report.findings) == 1
    missing = checked(config, f"data.val_path={tmp_path}/nope.jsonl")
    assert "nope.jsonl does not exist" in one(missing, "data files", "problem").found


def test_bad_rows_are_a_problem_unless_they_are_skipped(tiny_llama, tmp_path):
    bad = [{"messages": [{"role": "user", "content": "a"}]} for _ in range(25)]
    write_rows(tmp_path / "train.jsonl", [*SUMS, *bad])
    config = run_yaml(tmp_path, tiny_llama)
    what = one(checked(config), "rows: train", "problem").found
    assert ("25 of 65 rows of " in what, what.endswith("… and 5 more")) == (True, True)
    assert what.count("\n") == 21  # the counts, twenty rows, how many more
    report = checked(config, "data.on_bad_row=skip")
    assert (report.ok, states(report)["rows: train"]) == (True, "warning")


def test_targets_that_match_nothing_and_weights_that_are_missing_are_found(tiny_llama, tmp_path):
    write_rows(tmp_path / "train.jsonl", SUMS)
    report = checked(run_yaml(tmp_path, tiny_llama), "tuning.lora.target_modules=[q_prog]")
    assert any("q_prog" in check.found for check in report.findings if check.verdict == "FAIL")
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    (folder / "model.safetensors").unlink()
    assert "holds no *.safetensors" in one(checked(run_yaml(tmp_path, folder)), "model files", "problem").found


def test_a_named_machine_is_planned_for_and_its_disk_is_left_out(tiny_llama, tmp_path):
    write_rows(tmp_path / "train.jsonl", SUMS)
    report = check_run(run_yaml(tmp_path, tiny_llama), (), parse_hardware("2xH200"))
    assert "2 GPUs" in one(report, "memory plan", "ok").found
    assert states(report)["disk"] == "skipped"
    config = run_yaml(tmp_path, "Qwen/Qwen2.5-72B-Instruct")
    report = check_run(config, ("tuning.mode=full",), parse_hardware("1xRTX4090,ram=64GiB"))
    assert "does not fit" in one(report, "memory plan", "problem").found
    tried = Finding("memory plan", "WARN", "does NOT fit", "make plan shows the ways out")
    assert "Ready" not in CheckReport((tried,)).lines()[-1]


def test_rows_that_were_checked_are_not_tokenised_again(tiny_llama, tmp_path, monkeypatch):
    from sft_play.data.build import build
    from sft_play.training.prepare.tokenizer import load_tokenizer

    write_rows(tmp_path / "train.jsonl", SUMS)
    write_rows(tmp_path / "val.jsonl", SUMS[:3])
    write_rows(tmp_path / "text.txt", [{"text": f"{n} yes no " * 50} for n in range(30)])
    for words in (
        ["data.val_fraction=0.2"],
        [f"data.val_path={tmp_path / 'val.jsonl'}", "data.val_fraction=0.2"],
        ["task_mode=cpt_mixed", f"data.text_path={tmp_path / 'text.txt'}", "data.val_fraction=0.1"],
    ):
        path = run_yaml(tmp_path, tiny_llama)
        assert checked(path, *words).ok
        config = load_config(path, overrides=words).config
        with monkeypatch.context() as patch:
            patch.setattr(build, "_build_cache", None)  # what makes rows that are not in the cache
            tokenizer = load_tokenizer(config).tokenizer
            made = build_splits(config, find_data_paths(config.data), tokenizer, max_seq_len=128)
        assert made.train.stats.kept_rows > 30 - 3


def test_documents_are_counted_in_blocks(tiny_llama, tmp_path):
    write_rows(tmp_path / "train.jsonl", [{"text": "yes no " * 50} for _ in range(10)])
    config = run_yaml(tmp_path, tiny_llama)
    report = checked(config, "task_mode=cpt")
    assert states(report)["blocks: train"] == "ok", report.lines()
    few = checked(config, "task_mode=cpt", "model.max_seq_len=512", "data.max_lost_fraction=1")
    assert "full blocks of 512" in next(check.found for check in few.findings if check.name == "blocks: train")


def test_the_command_answers_with_its_exit_code_and_json(tiny_llama, tmp_path, command):
    config, out = run_yaml(tmp_path, tiny_llama), tmp_path / "check.json"
    for rows, code in ((SUMS, 0), ([{"messages": []}], 2)):
        write_rows(tmp_path / "train.jsonl", rows)
        assert command("check", "--config", str(config), "--out", str(out))[0] == code
        answer = json.loads(out.read_text())
        assert (answer["ok"], {"name", "state", "what", "do"}) == (code == 0, set(answer["checks"][0]))


WITH_BOS = ("bundled/metaspace", "bundled/pad_is_eos", "Mistral-7B-Instruct-v0.3", "SmolLM2")
WITHOUT = ("bundled/chatml", "bundled/rebuilt", "Qwen2.5-Instruct", "Phi-3-mini-4k-instruct")


@pytest.mark.parametrize("name", there([*WITH_BOS, *WITHOUT]))
def test_real_tokenizers_end_every_answer_with_a_token(name, tmp_path):
    from transformers import AutoTokenizer

    from sft_play.data.build.splits import count_source_rows

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(name))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    path = write_rows(tmp_path / "rows.jsonl", SUMS)
    config = load_config(run_yaml(tmp_path, "any", train_path=str(path))).config
    found = count_source_rows(config, path, "train", tokenizer, max_seq_len=512, has_val=False)
    assert (found.kept_rows, found.rows_with_open_end, found.lost_tokens) == (40, 0, 0)
    assert (found.rows_with_bos, sum(found.end_token_ids.values())) == (40 if name in WITH_BOS else 0, 40)


def test_several_processes_find_what_one_finds(tiny_llama, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    from sft_play.data.build import build
    from sft_play.data.build.splits import count_source_rows
    from sft_play.data.build.survey import count_readable_rows

    monkeypatch.setattr(build, "_MIN_PIECE_BYTES", 1_500)
    rows = [chat(f"question {number % 70}", f"answer {number % 70} " * (number % 7 + 1)) for number in range(150)]
    rows[3] = {"messages": []}
    rows[40] = chat("", "")
    rows[60] = chat("<|im_end|> in a text", "answer " * 200)
    rows[120] = {"messages": [{"role": "asistant", "content": "a"}]}
    path = write_rows(tmp_path / "rows.jsonl", rows)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    found = []
    for count in (1, 3):
        config = load_config(run_yaml(tmp_path, tiny_llama, train_path=str(path), workers=count)).config
        monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / f"cache of {count}"))
        found.append(count_source_rows(config, path, "train", tokenizer, max_seq_len=64, has_val=False))
    read = count_readable_rows(path, config.data, "train")
    assert (read.rows, sum(read.bad_rows.values()), found[0]) == (150, 2, found[1])
    assert found[0].repeated_rows > 10


@pytest.mark.parametrize("origin", SHARED_SLOWLY)
def test_no_broken_file_ends_in_a_foreign_exception(tiny_llama, tmp_path, origin):
    files = sorted(bad_inputs(origin).glob("*.json*"))
    assert len(files) > 20
    for file in files if origin == "shared" else files[::4]:
        report = check_run(run_yaml(tmp_path, tiny_llama, train_path=str(file)), (), parse_hardware("1xRTX4090"))
        assert report.findings[-1].name == "disk"
        assert any(check.name == "rows: train" for check in report.findings), file.name
        assert not any("\x1b" in line or "\x00" in line for line in report.lines()), file.name


def test_the_cost_of_a_limit_by_hand():
    """Rows of 4 and 6 tokens; trained are the positions 2, 3 and 3, 4, 5."""
    rows = [[-100, -100, 1, 1], [-100, -100, -100, 1, 1, 1]]
    end, prompt, drop = TruncationCost("end"), TruncationCost("prompt"), TruncationCost("drop")
    for cost in (end, prompt, drop):
        for row in rows:
            cost.add(len(row), trained_runs(row))
    assert (end.trained_tokens, end.longest) == (5, 6)
    assert [round(end.kept_share(limit) * 5) for limit in range(1, 7)] == [0, 0, 1, 3, 4, 5]
    assert [round(prompt.kept_share(limit) * 5) for limit in range(1, 7)] == [2, 4, 5, 5, 5, 5]
    assert [round(drop.kept_share(limit) * 5) for limit in range(1, 7)] == [0, 0, 0, 2, 2, 5]
    assert (end.smallest_limit(0.6), end.smallest_limit(1.0)) == (4, 6)
    assert trained_runs([5, -100, 1, 2, -100, 0]) == [(0, 1), (2, 4), (5, 6)]
    assert trained_runs([-100]) == trained_runs([]) == []


def rendered(config: Path, *words: str, out: Path | None = None, force: bool = False) -> CommandResult:
    return render(load_config(config, overrides=words), out=out, force=force)


def test_rows_are_rendered_in_order_with_their_spans(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.jsonl", SUMS)
    write_rows(tmp_path / "val.jsonl", SUMS[:3])
    answer = rendered(run_yaml(tmp_path, tiny_llama, val_path=str(tmp_path / "val.jsonl")))
    lines = [json.loads(line) for line in (tmp_path / "data/rendered/train.jsonl").read_text().splitlines()]
    first = lines[0]
    assert set(first) == {"where", "text", "spans", "tokens", "trained", "cut", "lost", "method"}
    assert first["text"] == "<|im_start|>user\nwhat is 0 + 0?<|im_end|>\n<|im_start|>assistant\nit is 0.<|im_end|>\n"
    assert [first["text"][start:end] for start, end in first["spans"]] == ["it is 0.<|im_end|>"]
    assert [line["where"].rpartition(":")[2] for line in lines] == [str(n) for n in range(1, 41)]
    assert sorted(path.name for path in (tmp_path / "data/rendered").glob("*.jsonl")) == ["train.jsonl", "val.jsonl"]
    assert answer.data["files"][0]["trained"] == sum(line["trained"] for line in lines)


def test_edited_files_and_bad_rows_stop_rendering_with_nothing_written(tiny_llama, tmp_path):
    write_rows(tmp_path / "train.jsonl", SUMS)
    config, out = run_yaml(tmp_path, tiny_llama), tmp_path / "sub" / "out.jsonl"
    for _ in range(2):
        rendered(config, out=out)
    out.write_text("mine\n")
    with pytest.raises(DataError, match="edited since make render wrote it"):
        rendered(config, out=out)
    write_rows(tmp_path / "train.jsonl", [*SUMS, {"messages": []}])
    with pytest.raises(DataError, match=r"1 of 41 rows of .* cannot be used: 1 x messages is empty\n.*train\.jsonl:41"):
        rendered(config, out=out, force=True)
    assert out.read_text() == "mine\n"
    answer = rendered(config, "data.on_bad_row=skip", out=out, force=True)
    assert answer.data["files"][0]["rows"] == len(out.read_text().splitlines()) == 40
    assert answer.data["files"][0]["reasons"] == {"messages is empty": 1}


def test_a_file_that_is_read_is_never_written_over(tiny_llama, tmp_path):
    source = write_rows(tmp_path / "train.jsonl", SUMS)
    config, before = run_yaml(tmp_path, tiny_llama), source.read_bytes()
    for write in (
        lambda: rendered(config, out=source, force=True), lambda: rendered(config, out=tmp_path, force=True),
        lambda: preview(load_config(config), count=None, row=None, page=source, force=True),
    ):  # fmt: skip
        with pytest.raises(DataError, match=r"is data\.train_path, which is read; name another file"):
            write()
    assert source.read_bytes() == before


@pytest.fixture
def pipeline(tmp_path, tiny_llama, monkeypatch) -> Callable[..., Path]:
    """A function that writes a run YAML, beside raw rows, with settings of data."""
    monkeypatch.chdir(tmp_path)
    raw = tmp_path / "data" / "raw" / "sums.jsonl"
    raw.parent.mkdir(parents=True)
    write_rows(raw, [{"question": f"what is {n}?", "answer": f"it is {n}."} for n in range(60)])

    def write(**data: Any) -> Path:
        path = tmp_path / "run.yaml"
        model = {"name": str(tiny_llama), "max_seq_len": 128}
        train = {"effective_batch_size": 8, "report_to": []}
        path.write_text(json.dumps({"model": model, "tuning": {"mode": "lora"}, "data": data, "train": train}))
        return path

    return write


def piped(config: Path, *, style: str | None = None, force: bool = False, why: bool = False) -> CommandResult:
    return full_pipeline(load_config(config), detect_hardware(), style=style, force=force, is_full=why)


def test_the_whole_way_with_a_style_reads_what_style_wrote(pipeline, tmp_path):
    answer = piped(pipeline(), style="You are terse.", why=True)
    assert [step["name"] for step in answer.data["steps"]] == ["process", "style", "render", "check"], answer.lines
    first = json.loads((tmp_path / "data/rendered/train.jsonl").read_text().splitlines()[0])
    assert first["text"].startswith("<|im_start|>system\nYou are terse.<|im_end|>\n")
    said = "\n".join(answer.lines)
    assert "make train with this config reads data.train_path=data/processed/train.jsonl" in said
    assert "checked below is data/processed_with_style/train.jsonl" in said


def test_a_style_of_the_config_is_given_once_to_every_command_that_reads_rows(pipeline, tmp_path, succeed):
    config = pipeline(style={"system": "Be brief."})

    def prompts() -> set[str]:
        rows = (tmp_path / "data/rendered/train.jsonl").read_text().splitlines()
        return {json.loads(row)["text"].partition("<|im_start|>user")[0] for row in rows}

    for style, expected in ((None, "Be brief."), ("You are terse.", "You are terse.")):
        answer = piped(config, style=style, force=True)
        assert answer.data["ok"], answer.lines
        assert prompts() == {f"<|im_start|>system\n{expected}<|im_end|>\n"}
    raw = f"data.train_path={tmp_path}/data/raw/sums.jsonl"
    succeed("render", "--config", str(config), raw, "--force")
    assert prompts() == {"<|im_start|>system\nBe brief.<|im_end|>\n"}
    told = succeed("preview", "--config", str(config), raw, "--force")
    assert told.replace("¦", "").count("Be·brief.") == 5
    (shown,) = [one for one in checked(config, raw).findings if one.name == "example"]
    assert "Be brief." in shown.found


def test_the_whole_way_stops_at_the_first_problem_and_keeps_what_came_before(pipeline, tmp_path):
    (tmp_path / "data/rendered").mkdir(parents=True)
    (tmp_path / "data/rendered/train.jsonl").write_text("mine\n")
    answer = piped(pipeline())
    said = answer.data
    assert (said["ok"], [step["name"] for step in said["steps"]], said["stopped"]["name"]) == (
        False,
        ["process"],
        "render",
    )
    assert (tmp_path / "data/processed/train.jsonl").is_file()
    assert (tmp_path / "data/rendered/train.jsonl").read_text() == "mine\n"
