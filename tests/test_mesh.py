"""`model.mesh_shape`: what it means, what is refused, and runs over ranks that share tensors or rows."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.long_rows import LONG_ROWS, long_rows
from sft_play.config.load import config_from_text, load_config
from sft_play.errors import ConfigError, HardwareError
from sft_play.launch import request
from sft_play.launch import run_hardware as of_ranks
from sft_play.launch.accelerate import _ACCELERATE_LAUNCH_VARIABLES, accelerate_launch_config, read_accelerate_file
from sft_play.launch.request import LaunchOptions
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.machine.network import NodeSetup
from sft_play.models.config_json import load_model_shape, parse_model_shape
from sft_play.models.families import MODEL_FAMILIES, TENSOR_PARALLEL_TYPES
from sft_play.planner import layout as layouts_of_runs
from sft_play.planner.advice import make_advised_plan
from sft_play.planner.batching import BatchPlan
from sft_play.planner.candidates import build_candidate
from sft_play.planner.decide import PlanRequest, build_plan_inputs, make_plan
from sft_play.planner.layout import LAYOUT_NAMES, MESH_AXES, Layout, Mesh, PreviousRun, find_layouts, parse_mesh
from sft_play.planner.plan import plan_from_json
from tests.conftest import chosen
from tests.models import uneven_run
from tests.ranks import found_by_ranks
from tests.ranks_mesh import NOT_DIVIDED
from tests.test_decisions import QUICK
from tests.test_distributed import losses, shapes
from tests.test_distributed import succeed as started

QWEN, LLAMA = "Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.1-8B"


def planned(config: Any, machine: str, *, name: str = LLAMA, **more: Any) -> Any:
    return make_advised_plan(PlanRequest(config, load_model_shape(name), parse_hardware(machine), **more))


def run(mesh: Any = None, *, name: str = LLAMA, mode: str = "lora", **settings: Any):
    words = [f"tuning.mode={mode}"]
    words += [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]
    words += [] if mesh is None else [f"model.mesh_shape={json.dumps(mesh)}"]
    return config_from_text(f"model: {{name: {name}}}", name="x", overrides=words)


def cpu(ranks: int) -> Hardware:
    return replace(parse_hardware("H100"), gpus=(), cpu_ranks=ranks)


@QUICK
@given(sizes=st.permutations([1, 1, 2, 3]), order=st.permutations(sorted(MESH_AXES)), upper=st.booleans())
def test_a_mesh_is_its_sizes_by_name_in_any_order(sizes, order, upper):
    wanted = dict(zip(order, sizes, strict=True))
    given_mesh = (tuple(sizes), tuple(name.upper() if upper else name for name in order))
    large = {name for name, size in wanted.items() if size > 1}
    if large in ({"tp", "cp"}, {"dp", "tp"}, {"dp", "cp"}):
        with pytest.raises(ConfigError, match=r"model\.mesh_shape=.* cannot be combined.*; use \[\["):
            parse_mesh(given_mesh)
        return
    mesh = parse_mesh(given_mesh)
    assert mesh == Mesh(**wanted)
    assert mesh.ranks == 6
    assert mesh.data_parallel_ranks == wanted["dp"] * wanted["fsdp"]
    assert parse_mesh(json.loads(re.sub(r"([a-z]+)", r'"\1"', str(mesh)))) == mesh  # as it is said is as it is written


def test_ranks_share_rows_where_a_window_is_as_long_as_they_are():
    fields = {
        "model_type": "mistral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 8192,
        "sliding_window": 4096,
    }  # fmt: skip
    for length, is_shared in ((4088, True), (4096, True), (4104, False)):
        config = config_from_text(f"model: {{name: m, max_seq_len: {length}}}\ntuning: {{mode: lora}}\n", name="x")
        shape, machine = parse_model_shape(fields, name="m"), parse_hardware("4xH100")
        assert bool(layouts_of_runs.context_parallel_layouts(config, shape, machine)) == is_shared


@pytest.mark.parametrize(("mesh", "layout"), [
    ([[1, 1], ["fsdp", "tp"]], Layout("single")), ([[4, 1], ["fsdp", "tp"]], Layout("fsdp", 4, 4)),
    ([[1, 4], ["fsdp", "tp"]], Layout("tp", 1, 1, 4)), ([2, 4], Layout("fsdp_tp", 2, 2, 4)),
    (8, Layout("fsdp", 8, 8)), ([8], Layout("fsdp", 8, 8)), ([[4], ["dp"]], Layout("ddp", 4)),
    ([[2, 4], ["dp", "fsdp"]], Layout("fsdp_hybrid", 8, 4)),
    ([[2, 2, 2], ["dp", "fsdp", "tp"]], Layout("fsdp_tp", 4, 2, 2)),
    ([[1, 8], ["fsdp", "cp"]], Layout("fsdp_cp", 1, 8, context_parallel=8)),
    ([[2, 2, 2], ["dp", "fsdp", "cp"]], Layout("fsdp_cp", 4, 4, context_parallel=2)),
])  # fmt: skip
def test_a_mesh_is_the_one_layout_of_its_plan(mesh, layout):
    count = layout.ranks
    plan = planned(run(mesh), f"{count}xH100")
    assert plan.choice.layout == layout
    assert {one.layout for one in plan.candidates} == {layout}
    assert plan.batch.ranks == layout.data_parallel
    assert plan_from_json(json.loads(json.dumps(plan.as_json()))) == plan
    for other in {1, 2, 4, 16} - {count}:
        with pytest.raises(ConfigError, match=f"is a mesh of {count} process.*start {count}, .*a mesh of {other}$"):
            planned(run(mesh), f"{other}xH100")


@pytest.mark.parametrize(("mesh", "problem"), [
    *((mesh, "[0-9] sizes, .* whole numbers from 1") for mesh in ([0, 1], [], -1, [[2, -1], ["fsdp", "tp"]])),
    ([[2, 2], ["fsdp"]], "2 sizes, .* and 1 names"), ([[2, 2], ["fsdp", "pp"]], "unknown axis"),
    ([[2, 2], ["tp", "TP"]], "named twice|unknown axis"), ([2, 2, 2], "3 sizes without names"),
    ([[2, 2], ["dp", "tp"]], r"DDP cannot be combined with tp or cp; use \[\[2, 2\], \[fsdp, tp\]\]"),
    ([[2, 2], ["tp", "cp"]], r"tp and cp cannot be combined; use \[\[4\], \[cp\]\]"),
])  # fmt: skip
def test_what_is_no_mesh_is_refused_with_what_to_write(mesh, problem):
    with pytest.raises(ConfigError, match=rf"^model\.mesh_shape=.*: {problem}"):
        planned(run(mesh), "4xH100")


def test_a_mesh_is_read_from_a_word_and_from_yaml_alike(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{name: {LLAMA}}}\ntuning: {{mode: lora}}\n")
    words = ('[[2,2],["fsdp","tp"]]', "[[2, 2], [fsdp, tp]]", "[[2,2],[fsdp,tp]]")  # its quotes eaten by a shell
    found = [load_config(file, overrides=[f"model.mesh_shape={word}"]).config.model.mesh_shape for word in words]
    file.write_text(file.read_text().replace("}", ", mesh_shape: [[2, 2], [fsdp, tp]]}", 1))
    assert [*found, load_config(file).config.model.mesh_shape] == [((2, 2), ("fsdp", "tp"))] * 4


@pytest.mark.parametrize(("mesh", "config", "because"), [
    ([1, 8], {"mode": "qlora"}, "NF4 weights cannot be split"), ([1, 8], {"tuning__lora__use_dora": True}, "DoRA"),
    ([1, 8], {"name": QWEN}, "28 heads and 4 key heads do not split over 8 ranks"),
    ([1, 4], {"name": "microsoft/phi-4", "mode": "full"}, "plan of phi3 models"),
    ([1, 4], {"name": "Qwen/Qwen3-30B-A3B", "mode": "full"}, "plan of qwen3_moe models"),
    ([1, 4], {"train__bf16": False, "train__fp16": True}, "loss scaling"),
    ([1, 4], {"train__optim": "paged_adamw_8bit"}, "do not support sharded parameters"),
    ([[1, 8], ["fsdp", "cp"]], {"name": QWEN}, "28 heads do not split over 8 ranks"),
    ([[1, 4], ["fsdp", "cp"]], {"data__packing": "best_fit"}, "data.packing=none"),
    ([[1, 4], ["fsdp", "cp"]], {"name": "google/gemma-3-4b-it", "mode": "full"}, "see only a window"),
    ([[1, 4], ["fsdp", "cp"]], {"model__attn_implementation": "eager"}, "sdpa attention only"),
    ([[1, 2], ["fsdp", "cp"]], {"name": "google/gemma-2-2b-it", "mode": "full"}, "sdpa attention only"),
])  # fmt: skip
def test_a_mesh_that_cannot_run_the_job_is_refused_before_anything_loads(mesh, config, because):
    count = math.prod(mesh[0] if isinstance(mesh[0], list) else mesh)
    with pytest.raises(ConfigError, match=rf"{because}.*; use \[\[{count}\], \[fsdp\]\], or null"):
        planned(run(mesh, **config), f"{count}xH100", name=config.get("name", LLAMA))


def test_the_types_that_are_divided_are_those_of_transformers():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
    for kind, family in MODEL_FAMILIES.items():
        plan = getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None) or {} if kind in CONFIG_MAPPING else {}
        paths = (*family.qkv, "self_attn.o_proj", *family.mlp)
        styles = [plan.get(f"layers.*.{path}") for path in paths]
        is_whole = set(plan.values()) <= whole and all(style in ("colwise", "rowwise") for style in styles)
        assert (kind in TENSOR_PARALLEL_TYPES) == is_whole, kind
    assert set(MODEL_FAMILIES) >= TENSOR_PARALLEL_TYPES


@pytest.fixture(scope="module")
def found(request, tmp_path_factory) -> dict[str, Any]:
    """What two ranks found (tests/ranks_mesh.py)."""
    kinds = json.dumps(chosen(request, "divided"))
    return found_by_ranks("tests.ranks_mesh", kinds, folder=tmp_path_factory.mktemp("mesh"))


@pytest.mark.build
@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("divided", [
    pytest.param(kind, marks=[] if kind in ("llama", "qwen3") else [pytest.mark.slow])
    for kind in sorted(TENSOR_PARALLEL_TYPES)
])  # fmt: skip
def test_a_model_of_two_parts_has_the_loss_and_gradients_of_the_whole_one(found, divided, mode):
    one = found["divided"][f"{divided} {mode}"]
    assert one["loss"] < 1e-6
    assert one["gradients"] < 2e-5
    assert one["held"] < 0.65  # embedding and head are whole on both
    in_bf16 = found["divided"]["qwen3 full bf16"]  # is as far from the whole as bf16 rounds
    assert in_bf16["loss"] < 2**-8
    assert in_bf16["gradients"] < 0.05


@pytest.mark.build
@pytest.mark.parametrize("kind", ["llama", "qwen3", "one key head", "gpt2", "mistral"])
def test_rows_that_two_ranks_share_have_the_loss_and_gradients_of_whole_rows(found, kind):
    one = found["shared"][kind]
    assert one["loss"] < 1e-6
    assert one["gradients"] < 2e-5
    assert one["whole_rows"] == 0.0


@pytest.mark.build
@pytest.mark.parametrize("kind", NOT_DIVIDED)
def test_a_class_that_would_be_divided_wrongly_is_refused(found, kind):
    assert "cannot be divided over tensor-parallel ranks" in found["refused"][kind]


def test_parts_divide_the_blocks_and_leave_embedding_head_and_norms_whole():
    shape, config = load_model_shape(LLAMA), run(mode="full")
    job = build_plan_inputs(PlanRequest(config, shape, parse_hardware("8xH100")))
    batch = planned(config, "8xH100").batch
    blocks = sum(kind.count * kind.linear_weights for kind in shape.layers)
    for fsdp, tp in ((1, 8), (2, 4), (4, 2)):
        layout = Layout("fsdp_tp" if fsdp > 1 else "tp", fsdp, fsdp, tp)
        one = build_candidate(job, layout, batch, 32)
        share = (shape.params - blocks + blocks / tp) / fsdp
        assert one.memory.terms["weights"] == pytest.approx(4 * share, rel=1e-3)  # fp32 copies of what trains
        assert one.memory.terms["optimizer"] == pytest.approx(8 * share, rel=1e-3)


def test_a_part_of_a_row_needs_a_part_of_its_activations():
    options = {"mode": "full", "train__batch_size": 1}
    for parts in (2, 8):
        mesh = run([[8 // parts, parts], ["fsdp", "cp"]], model__max_seq_len=8192, **options)
        shared = planned(mesh, "8xH100").choice
        alone = planned(run([[8], ["fsdp"]], model__max_seq_len=8192 // parts, **options), "8xH100").choice
        assert shared.checkpointed_layers == alone.checkpointed_layers
        assert (shared.batch.grad_accum > 1) == (alone.batch.grad_accum > 1)
        assert shared.memory.terms["activations"] == pytest.approx(alone.memory.terms["activations"], rel=0.01)
        assert shared.speed.tokens == 8192 * shared.batch.effective_batch


def test_published_rows_of_a_million_tokens_come_out_within_ten_percent():
    found = long_rows()
    assert len(found) == len(LONG_ROWS) >= 7
    for name, one in found.items():
        assert one["ratio_s"] == pytest.approx(1, abs=0.10), name
    first = found[LONG_ROWS[0].name]
    assert first["ratio_bytes"] == pytest.approx(1, abs=0.10)
    assert first["fits"]


def test_offloaded_checkpoints_leave_the_gpu_for_the_hosts_ram():
    shape = load_model_shape(LLAMA)
    kept, offloaded = (
        planned(run(mode="lora", train__gradient_checkpointing=wish, train__batch_size=4), "1xH100").choice
        for wish in (True, "offload")
    )
    inputs = 4 * 2048 * 2 * shape.hidden_size * shape.num_layers
    assert kept.memory.allocated - offloaded.memory.allocated == pytest.approx(inputs * 31 / 32, rel=0.1)
    assert offloaded.memory.host_bytes - kept.memory.host_bytes == inputs
    assert offloaded.speed.step_s > kept.speed.step_s
    assert "checkpointing with offload" in offloaded.checkpointing_text


@pytest.mark.parametrize("seed", [1, 2, 7])
def test_what_is_chosen_can_be_launched_from_2_to_1024_gpus(seed):
    draw, chosen = random.Random(seed), set()
    counts = [2, 3, 4, 6, 8, *(8 * nodes for nodes in (2, 3, 16, 128))]
    for count in draw.sample(counts, 5):
        machine = parse_hardware(f"{count}xH100" if count <= 8 else f"{count // 8}x8xH100,network=3200Gbps")
        mode = draw.choice(["full", "lora", "qlora"])
        config = run(mode=mode, train__effective_batch_size=draw.choice([1, 2, 8, 32, 96, 1024]))
        try:
            plan = make_advised_plan(PlanRequest(config, load_model_shape(LLAMA), machine))
        except ConfigError as error:
            assert re.search(rf"does not split over {count} ranks; use \d+ or \d+", str(error))  # noqa: PT017
            continue
        chosen.add(plan.layout)
        assert plan.layout in LAYOUT_NAMES
        assert plan.choice.layout.ranks == count
        assert plan.batch.effective_batch == config.train.effective_batch_size
        assert not any("does not launch" in str(one.rejected_because) for one in plan.candidates)
        possible, _ = find_layouts(config, load_model_shape(LLAMA), machine)
        assert plan.choice.layout in possible or plan.layout == "fsdp_cp"
    assert chosen


def test_a_row_too_long_for_a_gpu_is_shared_where_nothing_else_fits():
    long = run(mode="lora", model__max_seq_len=131_072, train__effective_batch_size=8)
    plan = planned(long, "8xL40S")
    assert (plan.layout, plan.fits) == ("fsdp_cp", True)
    assert not any(one.fits for one in plan.candidates if one.layout.context_parallel == 1)
    short = planned(run(mode="lora", train__effective_batch_size=8), "8xL40S")
    assert "fsdp_cp" not in {one.layout.name for one in short.candidates}
    assert not planned(long, "8xL40S", allowed_layouts=("ddp", "fsdp")).fits


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    uneven_run(folder, tiny_llama)
    return folder


@pytest.fixture(scope="module")
def alone(world) -> dict[str, dict[str, Any]]:
    found = {}
    for mode in ("full", "lora"):
        started(world, "train", *words(mode), f"output.name=alone-{mode}")
        folder = world / "outputs" / f"alone-{mode}"
        found[mode] = {"losses": losses(folder), "summary": summary_of(folder)}
    return found


def words(mode: str) -> list[str]:
    return [f"tuning.mode={mode}", "eval.generate_rows=3", "eval.max_new_tokens=4"]


def summary_of(run: Path) -> Any:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.build
@pytest.mark.parametrize(("mode", "mesh", "layout", "ranks"), [
    ("lora", "[[1,2],[fsdp,tp]]", "tp", 2), ("full", "[[1,2],[fsdp,cp]]", "fsdp_cp", 2),
    pytest.param("full", "[[2,2],[fsdp,tp]]", "fsdp_tp", 4, marks=pytest.mark.slow),
    pytest.param("lora", "[[2,2],[fsdp,cp]]", "fsdp_cp", 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_mesh_trains_what_one_process_trains_stopped_and_resumed(world, alone, mode, mesh, layout, ranks):
    """`make train` with a mesh of several processes is a launch; resumed, it has the ranks that it had."""
    from tests.test_going_on import logits

    name = f"{layout}-{mode}"
    asked = [*words(mode), f"model.mesh_shape={mesh}"]
    printed = started(world, "train", *asked, f"output.name={name}", "train.stop_after_steps=2").stdout
    assert re.search(f"Engine: {layout} proved: the model is a FSDP.* over {ranks} ranks", printed)
    started(world, "resume", *asked, RUN=name)
    folder = world / "outputs" / name
    assert losses(folder) == pytest.approx(alone[mode]["losses"], rel=2e-5)
    one, other = alone[mode]["summary"], summary_of(folder)
    for when in ("before", "after"):
        for name in ("loss", "exact_match", "rows"):
            assert other[when][name] == pytest.approx(one[when][name], rel=2e-5), (when, name)
    manifest = json.loads((folder / "manifest.json").read_text())
    shares = 1 if layout == "tp" else ranks // 2
    assert (manifest["processes"], manifest["batch"]["ranks"]) == (ranks, shares)
    saved = "model" if mode == "full" else "adapter"
    assert shapes(folder / saved) == shapes(world / "outputs" / f"alone-{mode}" / saved)
    base = Path(json.loads((folder / "resolved.json").read_text())["model"]["name"])
    found, wanted = (logits(run, mode, base) for run in (folder, world / "outputs" / f"alone-{mode}"))
    assert (found - wanted).abs().max() < 2e-3 * wanted.abs().max()


@pytest.mark.build
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "mesh"), [("full", "[[1,2],[fsdp,tp]]"), ("lora", "[[1,2],[fsdp,cp]]")])
def test_a_mesh_in_bf16_is_resumed_by_one_process(world, mode, mesh):
    name = f"bf16-{mode}"
    asked = [*words(mode), "train.bf16=true"]
    started(world, "train", *asked, f"model.mesh_shape={mesh}", f"output.name={name}", "train.stop_after_steps=3")
    started(world, "resume", *asked, RUN=name, NPROC="1")
    started(world, "train-distributed", *asked, f"output.name={name}-fsdp", STRATEGY="fsdp", NPROC="2")
    found, wanted = (losses(world / "outputs" / folder) for folder in (name, f"{name}-fsdp"))
    assert found == pytest.approx(wanted, rel=2**-6)


def test_a_resumed_run_keeps_its_mesh_only_over_as_many_processes_and_in_its_layout():
    draw, kinds = random.Random(43), set()
    for _ in range(300):
        fsdp, tp = draw.choice([(2, 1), (4, 1), (2, 2), (1, 2), (1, 4)])
        layout = {True: "fsdp", False: "fsdp_tp" if fsdp > 1 else "tp"}[tp == 1]
        ranks, nodes = fsdp * tp, draw.choice([1, 1, 2])
        strategy, before = draw.choice([None, None, layout, "ddp"]), draw.choice([layout, "ddp", None])
        processes, gpus = draw.choice([None, 1, 2, 4]), draw.choice([(), (), (0, 1)])
        options = LaunchOptions(strategy=strategy, processes_per_node=processes, gpus=gpus,  # type: ignore[arg-type]
                                nodes=NodeSetup(nodes, 0, "a", 1))  # fmt: skip
        previous = PreviousRun(before, BatchPlan(1, 1, 1)) if before else None  # type: ignore[arg-type]
        keeps = request._keeps_mesh(run([fsdp, tp]), options, previous)
        asked_layout = strategy or before or layout
        asked_processes = (processes or len(gpus)) * nodes or ranks
        assert keeps == (asked_layout == layout and asked_processes == ranks), (options, previous)
        kinds.add(keeps)
    assert kinds == {True, False}
    assert request._keeps_mesh(run(None), LaunchOptions(strategy="ddp"), None)


def test_plan_and_check_take_the_mesh_that_a_run_here_would_start(monkeypatch, tmp_path, command):
    """On random machines: what the launch would use is what is planned; too few GPUs are refused with what it takes."""
    draw, kinds = random.Random(35), set()
    for _ in range(200):
        count, (fsdp, tp) = draw.choice([0, 1, 2, 4, 8]), (draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 4]))
        machine = cpu(1) if count == 0 else replace(parse_hardware(f"{count}xH100"), named=False)
        config = run([fsdp, tp], train__effective_batch_size=24)
        for module in (request, of_ranks):
            monkeypatch.setattr(module, "detect_hardware", lambda machine=machine: machine)
        planned = of_ranks.mesh_hardware(config, machine)
        try:
            started = request.apply_mesh(LaunchOptions(), config).select_hardware(machine)
        except HardwareError:
            with pytest.raises(ConfigError, match=rf"start {fsdp * tp}, one for each GPU"):
                make_plan(PlanRequest(config, load_model_shape(LLAMA), planned))
            kinds.add("too few")
            continue
        assert (planned.ranks, planned.gpus) == (started.ranks, started.gpus)
        make_plan(PlanRequest(config, load_model_shape(LLAMA), planned))
        kinds.add("cpu" if count == 0 else "fewer" if planned.ranks < count else "all")
    assert kinds == {"too few", "cpu", "fewer", "all"}


def test_a_mesh_is_planned_and_checked_on_a_machine_without_gpus(tmp_path, tiny_llama, monkeypatch, succeed):
    words = ["--config", str(uneven_run(tmp_path, tiny_llama)), "tuning.mode=lora", "model.mesh_shape=[[2],[dp]]"]
    monkeypatch.setattr("sft_play.commands.request.detect_hardware", lambda: cpu(1))
    plan = json.loads(succeed("plan", "--json", *words).splitlines()[0])
    assert (plan["ranks"], plan["layout"]) == (2, "ddp")
    assert "ddp on the CPU" in succeed("check", *words)


@pytest.mark.build
def test_a_mesh_that_does_not_match_its_launch_is_refused(world, command, monkeypatch):
    asked = ["--config", f"{world}/run.yaml", *words("lora"), "model.mesh_shape=[[2,2],[fsdp,tp]]", "output.name=never"]
    for processes, strategy, said in (("2", "", "a mesh of 4 processes"), ("4", "ddp", "is another layout")):
        monkeypatch.setenv("NPROC", processes)
        monkeypatch.setenv("STRATEGY", strategy)
        code, printed = command("train-distributed", *asked)
        assert (code, said in printed) == (2, True), printed
    assert not (world / "outputs" / "never").exists()


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_mesh_that_does_not_fit_is_answered_with_changes_that_plan_as_they_say(mode):
    chance = random.Random(f"34 {mode}")
    name, kinds = "meta-llama/Llama-3.3-70B-Instruct", set()
    for _ in range(4):
        sizes = [[1, 2], ["fsdp", "tp"]], [[2, 2], ["fsdp", "tp"]], [[1, 4], ["fsdp", "cp"]], [[4], ["fsdp"]]
        mesh = chance.choice(sizes)
        optim = chance.choice(["adamw_torch_fused", "adafactor"]) if "tp" not in mesh[1] else "adamw_torch_fused"
        options = {"mode": mode, "train__optim": optim, "model__max_seq_len": chance.choice([2048, 8192])}
        machine = parse_hardware(f"{math.prod(mesh[0])}x{chance.choice(['RTX3060', 'RTX3070'])}")
        config = run(mesh, name=name, **options)
        plan = make_advised_plan(PlanRequest(config, load_model_shape(name), machine))
        assert plan.fits or plan.suggestions
        for way in (*plan.suggestions, *plan.not_enough):
            words = (way.setting or "").split()
            keys = [word.partition("=")[0] for word in words]
            assert len(set(keys)) == len(keys), way
            if way.hardware or "model.name" in keys:
                continue
            text = json.dumps(config.model_dump(mode="json", exclude_unset=True))
            changed = config_from_text(text, name="x", overrides=words)
            again = make_advised_plan(PlanRequest(changed, load_model_shape(name), machine))
            assert (again.fits, again.memory.required) == (way.fits, way.required) or not way.fits, way
            kinds.add("without the mesh" if "model.mesh_shape" in keys else "with it")
    assert kinds == {"with it", "without the mesh"}


def test_a_parallelism_config_of_accelerate_is_refused_where_it_divides(tmp_path):
    file, by_accelerate = tmp_path / "accelerate.yaml", dict.fromkeys(_ACCELERATE_LAUNCH_VARIABLES, "no")
    for axis, size in itertools.product(("dp_replicate", "dp_shard", "tp", "cp", "sp"), (1, 2)):
        key = f"parallelism_config_{axis}_size"
        file.write_text(f"distributed_type: FSDP\nparallelism_config: {{{key}: {size}}}\n")
        variables = {**by_accelerate, key.upper(): str(size)}
        if size > 1 and not axis.startswith("dp"):
            for ask in (lambda: read_accelerate_file(file), lambda: accelerate_launch_config(variables)):  # noqa: B023
                with pytest.raises(ConfigError, match=rf"divides by {axis}, which model.mesh_shape"):
                    ask()
        else:
            assert read_accelerate_file(file).layout == "fsdp"
            assert accelerate_launch_config(variables) is not None


def test_fsdp_in_a_file_of_accelerate_is_the_mesh_of_the_run(world, tmp_path, command, monkeypatch):
    plain = tmp_path / "fsdp.yaml"
    plain.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n")
    monkeypatch.setenv("ACCELERATE_CONFIG", str(plain))
    asked = ["--config", f"{world}/run.yaml", *words("lora"), "output.name=never", "model.mesh_shape=[1,2]"]
    code, printed = command("launch-command", *asked)
    assert (code, "Choice: tp " in printed) == (0, True), printed
