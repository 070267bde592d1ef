"""The launchers' files: accelerate's and DeepSpeed's configurations."""

import ast
import copy
import functools
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.config.load import config_from_text, load_config
from sft_play.errors import ConfigError, DataError
from sft_play.files import relative_to_cwd
from sft_play.launch import deepspeed, planning
from sft_play.launch.accelerate import read_accelerate_file, read_accelerate_nodes, write_accelerate_file
from sft_play.launch.deepspeed import ZERO_STAGES, fill_auto_values, read_deepspeed_file, shipped_deepspeed_config
from sft_play.launch.request import DeepspeedRequest, LaunchOptions, fill_from_accelerate, override_lines
from sft_play.machine.gpu import Gpu
from sft_play.machine.hardware import Hardware, parse_hardware
from sft_play.machine.network import NodeSetup
from sft_play.planner.batching import BatchPlan
from tests.conftest import ROOT, refusal_of

refusal = functools.partial(refusal_of, ConfigError)


def machine(gpus: int) -> Hardware:
    cards = tuple(Gpu(index, "Test GPU", 80 * 2**30, None, (9, 0)) for index in range(gpus))
    return Hardware(cards, "cpu", 8, 2**35, 2**35)


RUN = config_from_text("model: {name: a}\ntrain: {learning_rate: 2e-4}", name="run.yaml")
OPTIONS = deepspeed.deepspeed_options(RUN)
NUMBERS = deepspeed.PlanValues("zero2", BatchPlan(2, 4, 2), hidden_size=1024, compute_dtype="bfloat16", options=OPTIONS)


# --- accelerate: written ----------------------------------------------------------------------------------------------
def loaded_by_accelerate(path: Path):
    return pytest.importorskip("accelerate.commands.config.config_args").load_config_from_file(str(path))


@pytest.mark.parametrize(
    ("gpus", "machines", "kind", "total"),
    [(0, 1, "MULTI_CPU", 2), (1, 1, "NO", 1), (1, 2, "MULTI_GPU", 2), (8, 1, "MULTI_GPU", 8), (4, 3, "MULTI_GPU", 12)],
)
def test_accelerate_itself_loads_what_is_written(tmp_path, gpus, machines, kind, total):
    path = tmp_path / "sub" / "a.yaml"
    nodes = read_accelerate_nodes({"NUM_MACHINES": str(machines), "MAIN_IP": "10.0.0.1"} if machines > 1 else {})
    used = LaunchOptions(nodes=nodes).select_hardware(machine(gpus))
    written = write_accelerate_file(path, used, mixed_precision="bf16", nodes=nodes)
    theirs = loaded_by_accelerate(path)
    assert (theirs.distributed_type.value, theirs.num_processes, theirs.num_machines) == (kind, total, machines)
    assert (theirs.mixed_precision, theirs.use_cpu) == ("bf16", gpus == 0)
    assert theirs.main_process_port == (29500 if machines > 1 else None)
    assert "total over all machines" in path.read_text()
    assert path.read_text() == written


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "a.yaml"
    nodes = NodeSetup(2, 1, "node0", 29700)
    used = LaunchOptions(nodes=nodes, gpus=(1, 3)).select_hardware(machine(4))
    write_accelerate_file(path, used, mixed_precision="no", nodes=nodes, gpu_ids=(1, 3))
    config = read_accelerate_file(path)
    assert (config.num_processes, config.gpu_ids, config.mixed_precision) == (4, (1, 3), "no")
    assert (config.machine_rank, config.main_process_ip, config.main_process_port) == (1, "node0", 29700)
    assert loaded_by_accelerate(path).gpu_ids == "1,3"


def test_a_file_that_nobody_edited_is_renewed_and_an_edited_one_stays(tmp_path):
    path = tmp_path / "a.yaml"
    words = {"mixed_precision": "bf16", "nodes": NodeSetup()}
    write = lambda gpus, **more: write_accelerate_file(path, machine(gpus), **words, **more)  # noqa: E731
    assert write(2) == write(2) != write(4) == path.read_text()
    path.write_text(path.read_text().replace("num_processes: 4", "num_processes: 3"))
    with pytest.raises(DataError, match=r"edited since make setup-accelerate wrote it.*FORCE=1"):
        write(2)
    assert read_accelerate_file(path).num_processes == 3
    write(2, overwrite=True)
    assert read_accelerate_file(path).num_processes == 2
    other = tmp_path / "b.yaml"
    other.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    with pytest.raises(DataError, match="or not written by it"):
        write_accelerate_file(other, machine(2), **words)


def test_machines_come_from_the_environment():
    given = {"NUM_MACHINES": "2", "MACHINE_RANK": "1", "MAIN_IP": "10.1.2.3"}
    assert read_accelerate_nodes(given) == NodeSetup(2, 1, "10.1.2.3", 29500)
    assert read_accelerate_nodes({}) == NodeSetup()
    for name, value in [
        ("NUM_MACHINES", "two"), ("NUM_MACHINES", "0"), ("MAIN_PORT", "-1"), ("MACHINE_RANK", "1"),
        ("MAIN_IP", "a b;c"), ("MAIN_PORT", "70000"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            read_accelerate_nodes({name: value})
    with pytest.raises(ConfigError, match="NUM_MACHINES=2 needs MACHINE_RANK=0 to 1 and MAIN_IP="):
        read_accelerate_nodes({"NUM_MACHINES": "2"})


# --- accelerate: read -------------------------------------------------------------------------------------------------
QUESTIONNAIRE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 1
main_process_ip: 192.168.1.4
main_process_port: 29501
main_training_function: main
mixed_precision: 'no'
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def read(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    return read_accelerate_file(path)


def planned(dtype: str) -> Any:
    """What `override_lines` asks of a plan that accumulates four micro-batches."""
    return SimpleNamespace(precision=SimpleNamespace(compute=dtype), batch=SimpleNamespace(grad_accum=4))


def test_the_questionnaires_file_works_as_it_is_and_the_run_yaml_wins_aloud(tmp_path):
    config = read(tmp_path, QUESTIONNAIRE)
    assert (config.num_processes, config.gpu_ids) == (16, None)
    assert (config.machine_rank, config.main_process_ip, config.main_process_port) == (1, "192.168.1.4", 29501)
    (line,) = override_lines(config, planned("bfloat16"), max_grad_norm=1)
    assert all(said in line for said in ("mixed_precision: no", "bf16: the run YAML wins"))
    assert override_lines(config, planned("float32"), max_grad_norm=1) == []
    options = fill_from_accelerate(LaunchOptions(), config)
    assert (options.processes_per_node, options.nodes.count) == (8, 2)  # its processes are those of all machines
    of_each_gpu = read(tmp_path, QUESTIONNAIRE.replace("num_processes: 16\n", ""))
    assert fill_from_accelerate(LaunchOptions(), of_each_gpu).processes_per_node is None


def test_numbers_of_an_engines_block_that_the_plan_decides_are_said(tmp_path):
    block = "DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 8\n  gradient_clipping: 1.0"
    config = read(tmp_path, QUESTIONNAIRE.replace("MULTI_GPU", block))
    assert override_lines(config, planned("float32"), max_grad_norm=1) == [
        "theirs.yaml says deepspeed_config.gradient_accumulation_steps: 8, the plan 4: the plan wins"
    ]
    config = read(tmp_path, QUESTIONNAIRE.replace("MULTI_GPU", "FSDP\nfsdp_config:\n  fsdp_offload_params: true"))
    assert len(override_lines(config, planned("float32"), max_grad_norm=1)) == 2


@pytest.mark.parametrize(("change", "field", "value"), [
    (("mixed_precision: 'no'", "mixed_precision: no"), "mixed_precision", "no"),
    (("mixed_precision: 'no'", "mixed_precision: false"), "mixed_precision", "no"),
    (("gpu_ids: all", "gpu_ids: 0,1,2,3,4,5,6,9"), "gpu_ids", (0, 1, 2, 3, 4, 5, 6, 9)),
    (("num_processes: 16\n", ""), "num_processes", None),
    (("num_processes: 16", "num_processes: '16'"), "num_processes", 16),
    (("debug: false", "debug: false\nunknown_later_key: 3"), "num_processes", 16),
    (("MULTI_GPU", "FSDP\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD"), "layout", "fsdp_hybrid"),
    (("MULTI_GPU", "FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 1"), "layout", "fsdp"),
    (("MULTI_GPU", "FSDP\nfsdp_config:\n  fsdp_sharding_strategy: NO_SHARD"), "layout", "ddp"),
    (("MULTI_GPU", "DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3"), "layout", "zero3"),
    (("MULTI_GPU", "DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  offload_optimizer_device: cpu"),
     "layout", "zero2_offload"),
    (("MULTI_GPU", "DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: z.json"),
     "deepspeed_config_file", Path("z.json")),
])  # fmt: skip
def test_what_files_say_in_other_words_is_understood(tmp_path, change, field, value):
    assert change[0] in QUESTIONNAIRE
    assert getattr(read(tmp_path, QUESTIONNAIRE.replace(*change)), field) == value


@pytest.mark.parametrize(("change", "words"), [
    (("num_processes: 16", "num_processes: 15"), ["num_processes: 15", "num_machines: 2"]),
    (("num_processes: 16", "num_processes: many"), ["many", "integer"]),
    (("machine_rank: 1", "machine_rank: 2"), ["machine_rank: 2", "num_machines: 2"]),
    (("gpu_ids: all", "gpu_ids: 0,1,1"), ["gpu_ids", "twice"]),
    (("gpu_ids: all", "gpu_ids: first"), ["gpu_ids", "first"]),
    (("MULTI_GPU", "MULTI_XPU"), ["MULTI_XPU", "MULTI_GPU"]),
    (("mixed_precision: 'no'", "mixed_precision: half"), ["half", "bf16"]),
    (("29501", "99999"), ["main_process_port", "99999"]),
    (("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), ["AMAZON_SAGEMAKER"]),
    (("debug: false", "debug: false\ndebug: true"), ["debug", "twice"]),
])  # fmt: skip
def test_what_files_cannot_mean_is_one_message(tmp_path, change, words):
    assert change[0] in QUESTIONNAIRE
    said = refusal(read, tmp_path, QUESTIONNAIRE.replace(*change))
    assert all(word in said for word in [*words, "theirs.yaml"])


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words", "a: [1,", "\t", '{"zero_optimization": {}}'])
def test_a_file_of_another_shape_or_none_is_one_message(tmp_path, text):
    with pytest.raises(ConfigError, match=r"theirs\.yaml"):
        read(tmp_path, text)
    with pytest.raises(ConfigError, match=r"ACCELERATE_CONFIG=.*does not exist.*theirs\.yaml"):
        read_accelerate_file(tmp_path / "none.yaml")


# --- DeepSpeed: read --------------------------------------------------------------------------------------------------
def file(tmp_path: Path, text: str, name: str = "d.json") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_json_with_comments_and_trailing_commas_is_read_and_strings_are_left_alone(tmp_path):
    text = """\ufeff// from a guide
    {
\t"zero_optimization": {\t/* the stage, "quoted" */
        "stage": 2, # two
        "offload_optimizer": {"device": "nvme", "nvme_path": "/a//b/*c*/,}"},
      },
      "wandb": {"project": "say \\"//\\" ,]"},
    }
    """
    for name in ("d.json", "ds_config"):  # without an ending it is told by its content
        data = read_deepspeed_file(file(tmp_path, text, name))
        offload = {"device": "nvme", "nvme_path": "/a//b/*c*/,}"}
        assert data["zero_optimization"] == {"stage": 2, "offload_optimizer": offload}
        assert data["wandb"]["project"] == 'say "//" ,]'
    data = read_deepspeed_file(file(tmp_path, "zero_optimization:\n  stage: 3\n  reduce_bucket_size: 5e8\n", "d.yaml"))
    assert data["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 5e8}


@pytest.mark.parametrize(("text", "name", "words"), [
    ('{"a": 1, "a": 2}', "d.json", ["a", "twice"]),
    ('{\n "a": 1\n "b": 2}', "d.json", ["d.json:3:", "not valid YAML"]), ("[1, 2]", "d.json", ["[1, 2]"]),
    ("# nothing\n", "d.yaml", ["null"]),
    ('{"a": 1 /* open', "d.json", ["not valid YAML"]),
])  # fmt: skip
def test_what_cannot_be_read_is_one_message(tmp_path, text, name, words):
    said = refusal(read_deepspeed_file, file(tmp_path, text, name))
    assert all(word in said for word in words)
    with pytest.raises(ConfigError, match=rf"DEEPSPEED_CONFIG=.*none\.json does not exist.*{name}"):
        read_deepspeed_file(tmp_path / "none.json")


# --- DeepSpeed: understood --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("old", "new"), [
    ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
    ({"zero_optimization": {"cpu_offload": {"device": "nvme", "pin_memory": True}}},
     {"zero_optimization": {"offload_optimizer": {"device": "nvme", "pin_memory": True}}}),
    ({"zero_optimization": {"cpu_offload": False}},
     {"zero_optimization": {"offload_optimizer": {"device": "none"}}}),
    ({"aio": {"thread_count": 2}}, {"aio": {"intra_op_parallelism": 2}}),
    ({"_comment": "zero two", "zero_optimization": {"//": "x", "stage": 2}}, {"zero_optimization": {"stage": 2}}),
    ({"zero_optimization": {"cpu_offload": True, "cpu_offload_params": True}},
     {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}),
])  # fmt: skip
def test_old_forms_mean_what_they_meant(old, new):
    before = copy.deepcopy(old)
    assert deepspeed.translate_deepspeed_keys(old) == new
    assert old == before


@pytest.mark.parametrize(("raw", "words"), [
    ({"trian_batch_size": 8}, ["trian_batch_size is not a DeepSpeed key"]),
    ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, ["offload_optimizer.devise is not"]),
    ({"amp": {"enabled": True}}, ["amp is not"]),
    ({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}}, ["nvme", "disagree"]),
    ({"zero_optimization": {"stage": True}}, ["zero_optimization.stage: true"]),
    ({"zero_optimization": "auto"}, ["zero_optimization", "is not a section"]),
    ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, ["gpu", "nvme"]),
    ({"train_batch_size": 2.5}, ["train_batch_size: 2.5"]),
    ({"gradient_clipping": float("inf")}, ["gradient_clipping"]),
    ({"optimizer": {"params": [1]}}, ["optimizer.params"]),
    ({"sequence_parallel_size": 2}, ["sequence_parallel_size: 2"]),
    ({"expert_parallel": {"enabled": True}}, ["expert_parallel.enabled: true"]),
    ({"aa": 1, "bf16": {"on": True}}, ["aa", "bf16.on"]),
])  # fmt: skip
def test_what_deepspeed_does_not_know_or_the_plan_does_not_model_is_refused(raw, words):
    said = refusal(deepspeed.translate_deepspeed_keys, raw, name="my.json")
    assert all(word in said for word in [*words, "my.json"])


def fields_of(tree: ast.Module, name: str) -> set[str]:
    """Field names and aliases of a pydantic class; those that it marks as deprecated are left out."""
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    names = set()
    for field in found.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            words = {item.arg: item.value for item in field.value.keywords} if isinstance(field.value, ast.Call) else {}
            if "'deprecated'" not in ast.dump(words.get("json_schema_extra", ast.Constant(0))):
                alias = words.get("alias")
                names |= {field.target.id} | ({alias.value} if isinstance(alias, ast.Constant) else set())
    return names


def test_the_table_is_that_of_the_installed_deepspeed():
    folder = Path(find_spec("deepspeed").origin).parent
    table = json.loads((ROOT / "sft_play/launch/deepspeed_keys.json").read_text(encoding="utf-8"))["sections"]
    for section, row in table.items():
        if "class" in row:
            theirs = fields_of(ast.parse((folder / row["file"]).read_text(encoding="utf-8")), row["class"])
            assert theirs == deepspeed.KNOWN_DEEPSPEED_KEYS[section], (
                section,
                theirs ^ deepspeed.KNOWN_DEEPSPEED_KEYS[section],
            )


def test_what_is_filled_loads_in_the_installed_deepspeed():
    filled = [fill_auto_values(shipped_deepspeed_config(name), replace(NUMBERS, layout=name)) for name in ZERO_STAGES]
    code = (
        "import json, sys\n"
        "from deepspeed.runtime.config import DeepSpeedConfig\n"
        "for config in json.loads(sys.argv[1]):\n"
        "    config['train_batch_size'] //= 2\n"  # no process group: DeepSpeed counts one rank
        "    read = DeepSpeedConfig(config)\n"
        "    assert read.zero_config.stage == config['zero_optimization']['stage']\n"
    )
    words, environment = [sys.executable, "-c", code, json.dumps(filled)], {**os.environ, "DS_ACCELERATOR": "cpu"}
    answer = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr[-2000:]


# --- DeepSpeed: filled ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", sorted(ZERO_STAGES))
def test_no_auto_is_left(layout):
    raw = shipped_deepspeed_config(layout)
    path = ROOT / "configs" / "deepspeed" / f"{layout}.json"
    if layout in ("zero2", "zero3", "zero3_offload"):
        assert read_deepspeed_file(path) == raw
    assert deepspeed.translate_deepspeed_keys(raw) == raw
    config = fill_auto_values(raw, replace(NUMBERS, layout=layout))
    assert "auto" not in json.dumps(config)
    assert deepspeed.deepspeed_layout(config) == layout
    # micro 2 x accumulation 4 x 2 ranks = 16; 1024 squared = 1,048,576; 0.9 of it = 943,718.4; 10 x 1024 = 10,240
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (16, 2)
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (4, 1.0)
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (True, False)
    zero = config["zero_optimization"]
    assert zero["reduce_bucket_size"] == 1_048_576
    if layout.startswith("zero3"):
        assert zero["stage3_prefetch_bucket_size"] == 943_718
        assert zero["stage3_param_persistence_threshold"] == 10_240
    else:
        assert not zero.keys() & {"stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"}
    raw["zero_optimization"]["reduce_bucket_size"] = 5_000  # the user's number stays
    assert fill_auto_values(raw, replace(NUMBERS, layout=layout))["zero_optimization"]["reduce_bucket_size"] == 5_000


@pytest.mark.parametrize(("config", "words"), [
    ({"train_batch_size": 7}, ["train_batch_size: 7", "16"]),
    ({"train_micro_batch_size_per_gpu": 3}, ["train_micro_batch_size_per_gpu: 3", "plan's 2"]),
    ({"gradient_clipping": 0.5}, ["gradient_clipping: 0.5", "max_grad_norm: 1"]),
    ({"zero_optimization": {"stage": 3}}, ["zero3", "zero2"]),
    ({"optimizer": {"type": "OneBitAdam"}}, ["OneBitAdam", "train.optim"]),
    ({"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}, ["lr: 0.001", "0.0002"]),
    ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, ["amsgrad: true"]),
    ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, ["adam_w_mode: false"]),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}, ["warmup_num_steps: 100"]),
])  # fmt: skip
def test_a_number_that_contradicts_the_plan_names_both(config, words):
    said = refusal(fill_auto_values, config, NUMBERS, name="my.json")
    assert all(word in said for word in [*words, "my.json"])


def test_blocks_that_only_repeat_the_run_are_left_out_and_what_is_missing_is_the_plans():
    params = {"lr": 2e-4, "betas": [0.9, 0.999], "weight_decay": "auto", "torch_adam": True}
    raw = {
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
        "torch_autocast": {"enabled": True, "dtype": "fp16"},
        "zero_optimization": {"sub_group_size": "auto", "zenflow": {"select_strategy": "auto"}},
    }
    config = fill_auto_values(raw, NUMBERS)
    assert not {"optimizer", "scheduler"} & set(config)
    assert (config["torch_autocast"]["enabled"], config["bf16"]) == (False, {"enabled": True})
    assert config["zero_optimization"]["stage"] == 2
    # an auto that nobody resolves is left out, and DeepSpeed's own stays
    assert config["zero_optimization"]["zenflow"] == {"select_strategy": "auto"}
    assert "sub_group_size" not in config["zero_optimization"]
    forced = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}}
    config = fill_auto_values(forced, replace(NUMBERS, layout="zero3"))
    assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


def test_torchs_adamw_steps_where_deepspeeds_cannot_be_built(monkeypatch):
    key, shipped = "zero_force_ds_cpu_optimizer", shipped_deepspeed_config("zero3_offload")
    numbers = replace(NUMBERS, layout="zero3_offload")
    assert fill_auto_values(shipped, numbers, adam_obstacle="no C++ compiler")[key] is False
    assert key not in fill_auto_values(shipped, numbers)
    assert key not in fill_auto_values(shipped_deepspeed_config("zero2"), NUMBERS, adam_obstacle="x")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "my-compiler -x")
    assert [word for word in deepspeed.cpu_adam_obstacles() if "my-compiler" in word]
    assert "no ninja" in deepspeed.cpu_adam_obstacles()


def test_a_plan_takes_a_deepspeed_file_as_the_run_does(command, succeed, refuse, tmp_path):
    path, config = ROOT / "configs" / "deepspeed" / "zero3_offload.json", ROOT / "configs" / "run_bnb.yaml"
    words = ["model.name=Qwen/Qwen3-8B", "tuning.mode=lora", "plan.trace=false"]
    asked = ["plan", "--config", str(config), "--hardware", "2xH100", "--deepspeed_config"]
    found = json.loads(succeed(*asked, str(path), "--json", *words))
    options = LaunchOptions(deepspeed=DeepspeedRequest(path))
    loaded = load_config(config, overrides=words)
    run, _ = planning.plan_stage(planning.build_stage_request(loaded, parse_hardware("2xH100"), options))
    planned = json.loads(json.dumps(run.as_json()))
    for key in set(planned) - {"deepspeed", "reasons", "ways_out"}:
        assert found[key] == planned[key], key
    _, printed = command(*asked, str(path), *words)
    assert f"make train-deepspeed CONFIG={relative_to_cwd(config)} DEEPSPEED_CONFIG={relative_to_cwd(path)}" in printed
    assert "mine.json" in refuse(*asked, str(file(tmp_path, '{"zero_optimization": {"stage": 7}}', "mine.json")))


@pytest.mark.parametrize(("zero", "layout"), [
    ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "zero3_offload"),
    ({"stage": 3, "offload_param": {"device": "cpu"}}, "zero3"),
    ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, "zero1"),
    ({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}, "zero2_offload"), ({"stage": 0}, None),
    ({"stage": 2, "offload_param": {"device": "cpu"}}, None),
])  # fmt: skip
def test_a_file_is_planned_as_the_layout_of_its_stage_and_states_or_refused(zero, layout):
    if layout is not None:
        assert deepspeed.deepspeed_layout({"zero_optimization": zero}) == layout
        return
    with pytest.raises(ConfigError, match=r"STRATEGY=ddp|offload_param needs stage 3"):
        deepspeed.deepspeed_layout({"zero_optimization": zero})


def test_accelerates_questions_need_a_terminal(monkeypatch, tmp_path, refuse):
    monkeypatch.setenv("INTERACTIVE", "1")
    monkeypatch.setenv("ACCELERATE_CONFIG", str(tmp_path / "accelerate.yaml"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "no terminal" in refuse("setup-accelerate", "--config", str(ROOT / "configs" / "run_bnb.yaml"))
    assert not (tmp_path / "accelerate.yaml").exists()
