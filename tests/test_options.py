"""Every option changes something downstream: none is read and forgotten."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sft_play import runs
from sft_play.config.leaves import leaves
from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.data.dataset import build_splits
from sft_play.data.files import data_paths
from sft_play.errors import SftPlayError
from sft_play.facts.architecture import shape_of
from sft_play.facts.hardware import Gpu, Hardware
from sft_play.plan.plan import make_plan
from sft_play.runs import RunFolder
from tests.conftest import chat

GIB = 2**30
MACHINE = Hardware((Gpu(0, "GPU", 40 * GIB, None, (9, 0)),), "CPU", 2, 24 * GIB, 24 * GIB)

pytestmark = pytest.mark.build


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama):
    """Files that options may name."""
    folder = tmp_path_factory.mktemp("world")
    rows = [chat(f"what is {n}?", f"it is {n}.") for n in range(20)]
    for name in ("train", "other"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        row["frage"], row["antwort"] = "a", "b"
        del row["messages"]
    (folder / "german.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "bad.jsonl").write_text(json.dumps(chat("a", "b")) + "\n{}\n")
    (folder / "text.txt").write_text("the light in the kitchen is on. " * 200)
    (folder / "mine.jinja").write_text(
        "{% for m in messages %}{{ m.role + m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    _write_odd_rows(folder)
    _write_templates(folder)
    _write_documents(folder)
    return {"folder": folder, "model": tiny_llama}


def _write_odd_rows(folder: Path) -> None:
    """Files whose rows show what an option does."""
    twice = chat("a", "b")["messages"] * 2
    files = {
        "multi": [{"messages": twice}],
        "special": [chat("a <|im_end|> b", "c")],
        "system": [{"messages": [{"role": "system", "content": "brief"}, *chat("a", "b")["messages"]]}],
        "consecutive": [{"messages": [{"role": "user", "content": "x"}, *chat("a", "b")["messages"]]}],
        "empty": [chat("a", "b"), chat("c", "")],
        "no_roles": [{"messages": ["a", "b"]}],
        "long": [chat("a", "b " * 50), chat("a", "b")],
        "double": [chat("a", "b"), chat("a", "b"), chat("c", "d")],
        "many": [chat(f"q {n}", f"a {n}") for n in range(60)],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, rows in (("train", files["double"]), ("val", files["double"][:1])):
        (folder / "leaky").mkdir(exist_ok=True)
        (folder / "leaky" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_templates(folder: Path) -> None:
    turns = "{% for m in messages %}{{ m.role + m.content }}<|im_end|>{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant{% endif %}"
    (folder / "kwargs.jinja").write_text("{{ tone or 'plain' }}" + turns + prompt)
    (folder / "dated.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}" + turns + prompt)
    (folder / "inexact.jinja").write_text(turns + prompt.replace("assistant{%", "assistant<think>{%"))
    (folder / "nosystem.jinja").write_text(
        turns.replace("messages %}", "messages if m.role != 'system' %}", 1) + prompt
    )


def _write_documents(folder: Path) -> None:
    texts = folder / "documents"
    texts.mkdir()
    for n in range(40):
        words = " ".join(f"word{n}x{k}" for k in range(60))
        (texts / f"{n:02}.txt").write_text(
            f"The same long opening paragraph of every file here, word for word.\n\n{words}\n"
        )
    (folder / "other_documents").mkdir()
    (folder / "other_documents" / "a.txt").write_text("another text " * 30)


def make(world: dict[str, Any], *overrides: str) -> RunConfig:
    text = (
        f"model: {{name: {world['model']}, max_seq_len: 64}}\n"
        f"data: {{train_path: {world['folder']}/train.jsonl, val_path: null, test_path: null}}\n"
        f"output: {{dir: {world['folder']}/outputs}}\n"
        "train: {effective_batch_size: 8}\n"
    )
    filled = [override.replace("WORLD", str(world["folder"])) for override in overrides]
    return config_from_text(text, name="run.yaml", overrides=filled)


def plan(config: RunConfig) -> Any:
    made = make_plan(config, shape_of("Qwen/Qwen2.5-3B-Instruct"), MACHINE)
    return made.as_json()


def arguments(config: RunConfig) -> Any:
    from sft_play.train.trainer import training_arguments

    machine = Hardware((), "CPU", 2, 24 * GIB, 24 * GIB)
    made = make_plan(config, shape_of(config.model.name), machine)
    return training_arguments(config, made, RunFolder(Path("/nowhere")), has_eval=True).to_dict()


def trainer(config: RunConfig) -> Any:
    from sft_play.train.trainer import build_trainer, learning_rate

    seen: dict[str, Any] = {}

    class Recorder:
        def __init__(self, **options: Any) -> None:
            seen.update({key: options[key] for key in ("checkpoint_limit", "patience")})
            seen["packs"] = options["packs"] and len(options["packs"])
            seen["group_window"] = options["group_window"]
            seen["callbacks"] = [type(item).__name__ for item in options["callbacks"]]

        def remove_callback(self, *_: Any) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sft_play.train.trainer.PlannedTrainer", Recorder)
        machine = Hardware((), "CPU", 2, 24 * GIB, 24 * GIB)
        made = make_plan(config, shape_of(config.model.name), machine)
        train = splits(config, raw=True).train
        folder = RunFolder(Path(config.output.dir) / "x")
        build_trainer(
            config,
            made,
            folder,
            model=None,
            tokenizer=None,
            peft_config=None,
            train=train,
            evaluation=None,
            callbacks=[],
        )
    return seen, learning_rate(config)


def files_of(folder: Path) -> Any:
    """What stands in a folder, by name."""
    return {path.name: path.read_text() for path in sorted(folder.rglob("*.jsonl"))}


def processed(config: RunConfig) -> Any:
    """What `make process` writes, and where."""
    from sft_play.data.process import process

    process(config, force=True)
    return config.data.process.out_dir, files_of(Path(config.data.process.out_dir))


def styled(config: RunConfig) -> Any:
    """What `make style` writes, and where."""
    from sft_play.data.style import style

    processed(config)
    style(config, None, force=True)
    return config.data.style.out_dir, files_of(Path(config.data.style.out_dir))


def texts(config: RunConfig) -> Any:
    """What `make dapt-docx` writes, and where."""
    from sft_play.data.documents import documents

    documents(config, force=True)
    return config.data.documents.out_dir, files_of(Path(config.data.documents.out_dir))


def headers(config: RunConfig) -> Any:
    """Whether the page headers of a .docx are read."""
    import docx

    folder = Path(config.data.documents.path)
    folder.mkdir(exist_ok=True)
    made = docx.Document()
    made.add_paragraph("The body of the only page that there is, long enough to be kept.")
    made.sections[0].header.paragraphs[0].text = "Confidential header line"
    made.save(str(folder / "page.docx"))
    return texts(config)


def worker_count(config: RunConfig) -> Any:
    """How many processes are asked to make rows."""
    from sft_play.data import dataset

    asked: list[Any] = []
    real = dataset.build

    def record(*args: Any, workers: Any, **options: Any) -> Any:
        asked.append(workers)
        return real(*args, workers=1, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "build", record)
        splits(config)
    return asked


def blueprint(config: RunConfig) -> Any:
    from sft_play.plan.precision import Precision
    from sft_play.train.model import choose_backend, draw_blueprint

    drawn = draw_blueprint(config, Precision("float32", "float32", ""), tokenizer_size=100)
    peft = drawn.peft_config.to_dict() if drawn.peft_config else None
    return (
        choose_backend(config),
        drawn.attention,
        {k: sorted(v) if isinstance(v, set) else v for k, v in (peft or {}).items()},
    )


def loading(config: RunConfig) -> Any:
    from sft_play.train import model, tokenizer

    seen: list[Any] = []

    def record(*args: Any, **options: Any) -> None:
        seen.append((args, options))
        raise OSError("recorded")

    for target, ask in (
        ("transformers.AutoTokenizer", tokenizer.load_tokenizer),
        ("sft_play.train.model.AutoConfig", model._whole_config),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{target}.from_pretrained", record)
            with pytest.raises(SftPlayError):
                ask(config)
    return seen


def splits(config: RunConfig, *, raw: bool = False) -> Any:
    from sft_play.train.tokenizer import load_tokenizer

    loaded = load_tokenizer(config)
    made = build_splits(config, data_paths(config.data), loaded.tokenizer, max_seq_len=64)
    if raw:
        return made
    return [(split.rows[:], split.report) if split else None for split in (made.train, made.val, made.test)], made.notes


def folder(config: RunConfig) -> Any:
    Path(config.output.dir, "there").mkdir(parents=True, exist_ok=True)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return runs.new_folder(config.output, config_path=Path("run.yaml"), now=now).path


def decision(config: RunConfig) -> Any:
    """What an existing folder of ours means."""
    path = Path(config.output.dir) / "ours"
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text(json.dumps({"format": runs.FORMAT}))
    return runs.new_folder(config.output, config_path=Path("run.yaml")).path


def timeout(config: RunConfig) -> Any:
    """How long a rank waits for the others."""
    from sft_play.start import timeout_of

    return timeout_of(config, {})


def hybrid(config: RunConfig) -> Any:
    """The layouts of four ranks on one node."""
    from sft_play.plan.layout import layouts_for

    machine = Hardware((), "CPU", 2, 24 * GIB, 24 * GIB, cpu_ranks=4)
    return list(layouts_for(config, shape_of("Qwen/Qwen2.5-3B-Instruct"), machine)[0])


def traced(config: RunConfig) -> Any:
    """What asking for a trace on a CPU answers."""
    from sft_play.plan.precision import choose_precision
    from sft_play.trace.confirm import trace_candidate

    machine = Hardware((), "CPU", 2, 24 * GIB, 24 * GIB)
    shape = shape_of(config.model.name)
    made = make_plan(config, shape, machine)
    return trace_candidate(config, {}, shape, choose_precision(config, machine), made.choice)


OUT = ["data.process.out_dir=WORLD/processed"]
RAW = ["data.process.raw_path=WORLD/many.jsonl", *OUT]
RAW_DOUBLE = ["data.process.raw_path=WORLD/double.jsonl", *OUT]
RAW_LEAKY = ["data.process.raw_path=WORLD/leaky", *OUT]
RAW_SYSTEM = ["data.process.raw_path=WORLD/system.jsonl"]
STYLED = [*RAW, "data.style.system=be brief", "data.style.out_dir=WORLD/styled"]
TEXTS = ["data.documents.path=WORLD/documents", "data.documents.out_dir=WORLD/texts"]

PROBES: dict[str, tuple[Any, list[str], list[str]]] = {
    # leaf: (what is looked at, overrides before, overrides after)
    "model.name": (loading, [], ["model.name=WORLD"]),
    "model.revision": (loading, [], ["model.revision=v2"]),
    "model.trust_remote_code": (loading, [], ["model.trust_remote_code=true"]),
    "model.max_seq_len": (plan, [], ["model.max_seq_len=128"]),
    "model.dtype": (plan, [], ["model.dtype=float32"]),
    "model.attn_implementation": (blueprint, [], ["model.attn_implementation=eager"]),
    "model.mesh_shape": (plan, [], ["model.mesh_shape=[2, 2]"]),
    "task_mode": (splits, ["data.train_path=WORLD/text.txt"], ["data.train_path=WORLD/text.txt", "task_mode=cpt"]),
    "tuning.mode": (blueprint, [], ["tuning.mode=full"]),
    "tuning.backend": (blueprint, [], ["tuning.backend=unsloth"]),
    "tuning.backend_fallback": (
        blueprint, ["tuning.backend=unsloth"], ["tuning.backend=unsloth", "tuning.backend_fallback=bnb"],
    ),
    "tuning.lora.r": (blueprint, [], ["tuning.lora.r=4"]),
    "tuning.lora.alpha": (blueprint, [], ["tuning.lora.alpha=4"]),
    "tuning.lora.dropout": (blueprint, [], ["tuning.lora.dropout=0.1"]),
    "tuning.lora.target_modules": (blueprint, [], ["tuning.lora.target_modules=[q_proj]"]),
    "tuning.lora.modules_to_save": (blueprint, [], ["tuning.lora.modules_to_save=[lm_head]"]),
    "tuning.lora.use_rslora": (blueprint, [], ["tuning.lora.use_rslora=true"]),
    "tuning.lora.use_dora": (blueprint, [], ["tuning.lora.use_dora=true"]),
    "data.train_path": (splits, [], ["data.train_path=WORLD/other.jsonl"]),
    "data.val_path": (splits, [], ["data.val_path=WORLD/other.jsonl"]),
    "data.test_path": (splits, [], ["data.test_path=WORLD/other.jsonl"]),
    "data.text_path": (
        splits,
        ["task_mode=cpt_mixed", "data.text_path=WORLD/text.txt"],
        ["task_mode=cpt_mixed", "data.text_path=WORLD/nothing.txt"],
    ),
    "data.text_fraction": (
        splits,
        ["task_mode=cpt_mixed", "data.text_path=WORLD/text.txt"],
        ["task_mode=cpt_mixed", "data.text_path=WORLD/text.txt", "data.text_fraction=0.1"],
    ),
    "data.val_fraction": (splits, [], ["data.val_fraction=0.3"]),
    "data.columns": (
        splits,
        ["data.train_path=WORLD/german.jsonl"],
        ["data.train_path=WORLD/german.jsonl", "data.columns={question: frage, answer: antwort}"],
    ),
    "data.chat_template": (splits, [], ["data.chat_template=WORLD/mine.jinja"]),
    "data.loss_on": (splits, [], ["data.loss_on=all"]),
    "data.on_bad_row": (
        splits, ["data.train_path=WORLD/bad.jsonl"], ["data.train_path=WORLD/bad.jsonl", "data.on_bad_row=skip"],
    ),
    "data.chat_template_kwargs": (
        splits,
        ["data.chat_template=WORLD/kwargs.jinja"],
        ["data.chat_template=WORLD/kwargs.jinja", "data.chat_template_kwargs={tone: loud}"],
    ),
    "data.template_date": (
        splits,
        ["data.chat_template=WORLD/dated.jinja"],
        ["data.chat_template=WORLD/dated.jinja", "data.template_date='2001-02-03'"],
    ),
    "data.multi_turn": (
        splits, ["data.train_path=WORLD/multi.jsonl"], ["data.train_path=WORLD/multi.jsonl", "data.multi_turn=split"],
    ),
    "data.on_inexact_mask": (
        splits,
        ["data.chat_template=WORLD/inexact.jinja"],
        ["data.chat_template=WORLD/inexact.jinja", "data.on_inexact_mask=train"],
    ),
    "data.special_tokens_in_text": (
        splits,
        ["data.train_path=WORLD/special.jsonl"],
        ["data.train_path=WORLD/special.jsonl", "data.special_tokens_in_text=control"],
    ),
    "data.system_into_user": (
        splits,
        ["data.train_path=WORLD/system.jsonl", "data.chat_template=WORLD/nosystem.jinja"],
        [
            "data.train_path=WORLD/system.jsonl", "data.chat_template=WORLD/nosystem.jinja",
            "data.system_into_user=true",
        ],
    ),
    "data.turns_without_roles": (
        splits,
        ["data.train_path=WORLD/no_roles.jsonl"],
        ["data.train_path=WORLD/no_roles.jsonl", "data.turns_without_roles=alternate"],
    ),
    "data.merge_consecutive": (
        splits,
        ["data.train_path=WORLD/consecutive.jsonl"],
        ["data.train_path=WORLD/consecutive.jsonl", "data.merge_consecutive=true"],
    ),
    "data.drop_empty": (
        splits, ["data.train_path=WORLD/empty.jsonl"], ["data.train_path=WORLD/empty.jsonl", "data.drop_empty=true"],
    ),
    "data.truncate": (
        splits,
        ["data.train_path=WORLD/long.jsonl", "data.max_lost_fraction=1.0"],
        ["data.train_path=WORLD/long.jsonl", "data.max_lost_fraction=1.0", "data.truncate=drop"],
    ),
    "data.max_lost_fraction": (
        splits,
        ["data.train_path=WORLD/long.jsonl"],
        ["data.train_path=WORLD/long.jsonl", "data.max_lost_fraction=1.0"],
    ),
    "data.packing": (trainer, [], ["data.packing=best_fit"]),
    "data.workers": (worker_count, [], ["data.workers=2"]),
    "data.process.raw_path": (processed, RAW, ["data.process.raw_path=WORLD/multi.jsonl", *OUT]),
    "data.process.out_dir": (processed, RAW, [*RAW, "data.process.out_dir=WORLD/elsewhere_processed"]),
    "data.process.val_fraction": (processed, RAW, [*RAW, "data.process.val_fraction=0.4"]),
    "data.process.test_fraction": (processed, RAW, [*RAW, "data.process.test_fraction=0.4"]),
    "data.process.drop_duplicates": (processed, RAW_DOUBLE, [*RAW_DOUBLE, "data.process.drop_duplicates=true"]),
    "data.process.drop_leaks": (processed, RAW_LEAKY, [*RAW_LEAKY, "data.process.drop_leaks=true"]),
    "data.style.system": (styled, STYLED, [*STYLED, "data.style.system=be loud"]),
    "data.style.how": (
        styled, [*STYLED, *RAW_SYSTEM], [*STYLED, *RAW_SYSTEM, "data.style.how=replace"],
    ),
    "data.style.per_source": (styled, STYLED, [*STYLED, 'data.style.per_source={"*": be quiet}']),
    "data.style.out_dir": (styled, STYLED, [*STYLED, "data.style.out_dir=WORLD/elsewhere_styled"]),
    "data.documents.path": (texts, TEXTS, [*TEXTS, "data.documents.path=WORLD/other_documents"]),
    "data.documents.out_dir": (texts, TEXTS, [*TEXTS, "data.documents.out_dir=WORLD/elsewhere_texts"]),
    "data.documents.val_fraction": (texts, TEXTS, [*TEXTS, "data.documents.val_fraction=0.5"]),
    "data.documents.chunk_chars": (texts, TEXTS, [*TEXTS, "data.documents.chunk_chars=200"]),
    "data.documents.drop_repeated": (texts, TEXTS, [*TEXTS, "data.documents.drop_repeated=false"]),
    "data.documents.headers": (
        headers,
        [*TEXTS, "data.documents.path=WORLD/pages"],
        [*TEXTS, "data.documents.path=WORLD/pages", "data.documents.headers=true"],
    ),
    "train.group_by_length": (trainer, [], ["train.group_by_length=false"]),
    "train.effective_batch_size": (plan, [], ["train.effective_batch_size=16"]),
    "train.batch_size": (plan, [], ["train.batch_size=2"]),
    "train.grad_accum": (plan, [], ["train.grad_accum=4"]),
    "train.epochs": (arguments, [], ["train.epochs=3"]),
    "train.max_steps": (arguments, [], ["train.max_steps=3"]),
    "train.learning_rate": (arguments, [], ["train.learning_rate=0.5"]),
    "train.lr_scheduler_type": (arguments, [], ["train.lr_scheduler_type=linear"]),
    "train.warmup_steps": (arguments, [], ["train.warmup_steps=7"]),
    "train.weight_decay": (arguments, [], ["train.weight_decay=0.1"]),
    "train.max_grad_norm": (arguments, [], ["train.max_grad_norm=0.1"]),
    "train.optim": (arguments, [], ["train.optim=adafactor"]),
    "train.bf16": (plan, [], ["train.bf16=false"]),
    "train.fp16": (plan, [], ["train.fp16=true"]),
    "plan.trace": (traced, [], ["plan.trace=false"]),
    "train.gradient_checkpointing": (arguments, [], ["train.gradient_checkpointing=true"]),
    "train.logging_steps": (arguments, [], ["train.logging_steps=9"]),
    "train.save_steps": (arguments, [], ["train.save_steps=9"]),
    "train.save_total_limit": (trainer, [], ["train.save_total_limit=9"]),
    "train.load_best_model_at_end": (arguments, [], ["train.load_best_model_at_end=true"]),
    "train.metric_for_best_model": (
        arguments, ["eval.generate_rows=1"], ["eval.generate_rows=1", "train.metric_for_best_model=exact_match"],
    ),
    "train.early_stopping_patience": (
        trainer,
        ["train.load_best_model_at_end=true"],
        ["train.load_best_model_at_end=true", "train.early_stopping_patience=3"],
    ),
    "train.seed": (arguments, [], ["train.seed=1"]),
    "train.profile_steps": (trainer, [], ["train.profile_steps=2"]),
    "train.report_to": (trainer, [], ["train.report_to=[]"]),
    "train.dataloader_num_workers": (arguments, [], ["train.dataloader_num_workers=2"]),
    "eval.steps": (arguments, [], ["eval.steps=5"]),
    "eval.batch_size": (plan, [], ["eval.batch_size=3"]),
    "distributed.timeout_s": (timeout, [], ["distributed.timeout_s=60"]),
    "distributed.shard_ranks": (hybrid, [], ["distributed.shard_ranks=2"]),
    "output.dir": (folder, [], ["output.dir=WORLD/elsewhere"]),
    "output.name": (folder, [], ["output.name=mine"]),
    "output.if_exists": (decision, ["output.name=ours"], ["output.name=ours", "output.if_exists=resume"]),
}  # fmt: skip

RUN_PROBES: dict[str, list[str]] = {
    "train.stop_after_steps": ["train.stop_after_steps=1"],
    "eval.generate_rows": ["eval.generate_rows=0"],
    "eval.max_new_tokens": ["eval.max_new_tokens=1"],
    "eval.before_training": ["eval.before_training=false"],
}
"""Leaves whose effect is a run's: what its summary and log say."""

NEEDS_A_GPU = {"train.dataloader_pin_memory"}
"""Pinned memory exists with a GPU only: its argument is looked at below with one that is only named."""


def outcome(probe: Any, config: RunConfig) -> Any:
    try:
        return probe(config)
    except SftPlayError as error:
        return str(error)


def test_every_option_is_probed():
    assert set(PROBES) | set(RUN_PROBES) | NEEDS_A_GPU == set(leaves())


@pytest.mark.parametrize("leaf", sorted(PROBES))
def test_changing_an_option_changes_something_downstream(leaf, world):
    probe, before, after = PROBES[leaf]
    assert outcome(probe, make(world, *before)) != outcome(probe, make(world, *after))


@pytest.mark.parametrize("leaf", sorted(PROBES))
def test_a_probe_is_stable(leaf, world):
    probe, before, _ = PROBES[leaf]
    assert outcome(probe, make(world, *before)) == outcome(probe, make(world, *before))


def test_changing_an_option_of_a_run_changes_its_summary(world, command, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{name: {world['model']}, max_seq_len: 64}}\n"
        f"data: {{train_path: {world['folder']}/train.jsonl, val_path: null, test_path: null, val_fraction: 0.3}}\n"
        "tuning: {mode: lora}\n"
        "train: {effective_batch_size: 4, max_steps: 2, report_to: [], gradient_checkpointing: false}\n"
        f"eval: {{steps: 0, generate_rows: 2, max_new_tokens: 6}}\noutput: {{dir: {tmp_path}/outputs}}\n"
    )

    def said(name: str, *overrides: str) -> Any:
        code, printed = command("train", "--config", str(path), f"output.name={name}", *overrides)
        assert code == 0, printed
        summary = json.loads((tmp_path / "outputs" / name / "summary.json").read_text())
        answers = [line for line in printed.splitlines() if "after:" in line]
        return {key: summary[key] for key in ("status", "before", "after", "steps")}, answers

    usual = said("usual")
    for leaf, overrides in RUN_PROBES.items():
        assert said(leaf.replace(".", "-"), *overrides) != usual, leaf


def test_pinned_memory_is_asked_for_with_a_gpu_only(world):
    from sft_play.train import trainer as module

    def pinned(machine: Hardware, *overrides: str) -> bool:
        config = make(world, *overrides)
        made = make_plan(config, shape_of(config.model.name), machine)
        seen: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SFTConfig", Recording(seen))
            module.training_arguments(config, made, RunFolder(Path("/nowhere")), has_eval=False)
        return bool(seen["dataloader_pin_memory"])

    assert pinned(MACHINE)
    assert not pinned(MACHINE, "train.dataloader_pin_memory=false")
    assert not pinned(Hardware((), "CPU", 2, 24 * GIB, 24 * GIB))


class Recording:
    """Stands for SFTConfig: keeps its arguments."""

    def __init__(self, seen: dict[str, Any]) -> None:
        from trl import SFTConfig

        self._seen = seen
        self.__dataclass_fields__ = SFTConfig.__dataclass_fields__

    def __call__(self, **options: Any) -> None:
        self._seen.update(options)
