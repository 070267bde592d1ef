"""The traced step against real tensors: the same events, the same bytes; every patch against what it stands for."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, masking_utils

from benchmarks.memory_model import old_scripts  # noqa: F401  (which lets the tracer run them)
from benchmarks.memory_model.script_settings import to_script_settings
from benchmarks.memory_model.streams import USED
from sft_play.errors import ModelError
from sft_play.machine.software import installed_version
from sft_play.models.config_json import parse_model_shape
from sft_play.planner.batching import MicroBatches
from sft_play.planner.layout import SINGLE
from sft_play.planner.memory.model_states import nf4_bytes
from sft_play.planner.memory.step_memory import Step, cublas_workspace_bytes
from sft_play.trace import build, kernels, patches, step
from sft_play.trace.confirm import cached_trace
from sft_play.trace.settings import StepSettings, TraceUnavailable
from sft_play.trace.storages import ALLOC, FREE, PHASE_START, StorageLog
from sft_play.training.loop.trainer import PlannedTrainer
from tests.ranks import found_by_ranks

pytestmark = pytest.mark.build

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64,
    "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA3 = LLAMA | {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 4,
    "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 16,
    "layer_types": 3 * ["sliding_attention"] + ["full_attention"],
}  # fmt: skip
TIED = LLAMA | {"tie_word_embeddings": True}
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
SMALL = StepSettings(model=LLAMA, mode="full", micro_batch=2, seq_len=48, attention="eager")
OF_SCRIPTS = {"sgd", "fsdp1", "holds_outputs", "checkpoints_wrappers"}


def changed(changes: dict) -> StepSettings:
    """SMALL with these changes, as a script's where this toolkit's steps have no such thing."""
    is_script = OF_SCRIPTS & {*changes, changes.get("optimizer"), changes.get("strategy")}
    return to_script_settings(SMALL, **changes) if is_script else dataclasses.replace(SMALL, **changes)


def phase_peaks(log: StorageLog) -> dict[str, int]:
    live: dict[object, int] = {}
    phase, current, peaks = "build", 0, {}
    for kind, key, number, _ in log.events:
        if kind == ALLOC:
            live[key] = number
            current += number
        elif kind == FREE:
            current -= live.pop(key)
        elif kind == PHASE_START:
            phase = f"{key} {number}"
        peaks[phase] = max(peaks.get(phase, 0), current)
    return peaks


GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_positions": 128, "vocab_size": 512,
}  # fmt: skip


CASES = {
    "full": {}, "full, no checkpointing": {"checkpointing": False},
    "full, no autocast": {"autocast": None, "checkpointing": False}, "lora": {"mode": "lora", "peft": LORA},
    "dora": {"mode": "lora", "peft": {**LORA, "use_dora": True}}, "qlora": {"mode": "qlora", "peft": LORA},
    "qdora": {"mode": "qlora", "peft": {**LORA, "use_dora": True}, "checkpointing": False},
    "dropout, reentrant": {"mode": "lora", "peft": {**LORA, "lora_dropout": 0.1}, "reentrant": True},
    "tied": {"model": TIED}, "tied, whole logits held": {"model": TIED, "loss": "logits", "holds_outputs": True},
    "foreach, shifted logits": {"loss": "logits_shifted", "optimizer": "adamw_foreach"},
    "sliding windows": {"model": GEMMA3}, "layer norms and stepwise gelu": {"model": GPT2, "checkpointing": False},
    "evaluation": {"model": GEMMA3, "mode": "lora", "peft": LORA, "eval_batch": 4},
    "accumulation, two of three layers checkpointed": {"grad_accum": 3, "checkpointed_layers": 2},
    "fp32 weights, sgd": {"weights": "float32", "optimizer": "sgd"}, "adafactor": {"optimizer": "adafactor"},
    "fp16, no mask": {"mask": "none", "weights": "float16", "autocast": None},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _not_the_first_trace() -> None:
    """A process's first trace makes constants that last (512 bytes each)."""
    step.record_step(dataclasses.replace(SMALL, optimizer_steps=1))


OFTEN = {"full", "full, no checkpointing", "lora", "dora", "qlora", "dropout, reentrant", "tied, whole logits held"}
OFTEN |= {"sliding windows", "evaluation", "accumulation, two of three layers checkpointed"}
"""The cases that every run of the tests looks at; the others take two seconds each."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in CASES]
)
def test_fake_tensors_live_and_die_like_real_ones(name):
    settings = changed(CASES[name])
    torch.manual_seed(0)
    fake, real = (phase_peaks(step.record_step(settings, uses_real_tensors=real)) for real in (False, True))
    assert fake == real
    assert max(fake.values()) > fake["build"] > 0


class Marks(TrainerCallback):
    def __init__(self, log: StorageLog) -> None:
        self.log = log

    def on_step_begin(self, args, state, control, **_):
        self.log.start_phase("step", state.global_step)

    def on_train_end(self, args, state, control, **_):
        self.log.start_phase("end", state.global_step)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_the_loop_stands_for_this_toolkits_trainer(mode, tmp_path):
    """`PlannedTrainer.train` on real CPU tensors, under the same log and patches: the same highest bytes to 0.1%."""
    from datasets import Dataset
    from trl import SFTConfig

    from tests.models import make_tokenizer

    make_tokenizer(tmp_path)
    model = LLAMA | {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 8000}
    model |= {"max_position_embeddings": 512}
    options = {"mode": mode, "peft": None if mode == "full" else LORA, "checkpointing": mode == "lora"}
    sizes = {"micro_batch": 4, "seq_len": 512, "optimizer_steps": 3}
    settings = StepSettings(model=model, attention="eager", capability=(8, 0), **options, **sizes)
    ids = torch.randint(5, 300, (16, 512)).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    log = StorageLog(workspace_sizes=kernels.workspace_sizes)
    args = SFTConfig(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=4, max_steps=3, use_cpu=True, bf16=True,
        optim="adamw_torch_fused", report_to=[], save_strategy="no", disable_tqdm=True, max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True}, activation_checkpointing=settings.checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    with log, patches.install_patches(patches.TraceState(settings, log)):
        config = build.language_model_config(settings)
        plan = SimpleNamespace(
            choice=SimpleNamespace(layout=SINGLE, step=Step(4, 1, 512)), micro_batches=MicroBatches(4),
            batch=SimpleNamespace(effective_batch=4), memory=SimpleNamespace(terms={}),
        )  # fmt: skip
        trainer = PlannedTrainer(
            plan=plan,
            model=AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager"),
            args=args, train_dataset=rows, token_rows=rows,
            processing_class=AutoTokenizer.from_pretrained(tmp_path),
            peft_config=build.parse_peft_config(settings.peft) if settings.peft else None, callbacks=[Marks(log)],
        )  # fmt: skip
        trainer.train()
    trained = phase_peaks(log)
    workspaces = 2 * cublas_workspace_bytes((8, 0))
    traced = phase_peaks(step.record_step(settings))
    ours = max(value for phase, value in traced.items() if phase.endswith((" 1", " 2")))
    assert ours - workspaces == pytest.approx(max(trained["step 1"], trained["step 2"]), rel=1e-3)


def test_every_shim_has_a_name_a_reason_and_passes_its_guard():
    assert len({patch.name for patch in patches.PATCHES}) == len(patches.PATCHES) >= 15
    for patch in patches.PATCHES:
        assert len(patch.reason.split()) >= 5
        patch.resolve_target()
        gone = dataclasses.replace(patch, target=patch.target + "_that_was_renamed")
        with pytest.raises(TraceUnavailable, match="_that_was_renamed"):
            gone.resolve_target()


@pytest.mark.parametrize("patch", [one for one in patches.PATCHES if one.parameters], ids=lambda one: one.name)
def test_a_library_that_moved_on_is_named(patch, monkeypatch):
    holder, name, _ = patch.resolve_target()
    monkeypatch.setattr(holder, name, lambda something_else: None)
    with pytest.raises(TraceUnavailable) as error:
        patch.resolve_target()
    library = patch.target.split(".")[0].split(":")[0]
    assert all(part in str(error.value) for part in (patch.name, f"{library} {installed_version(library)}"))


def test_shims_are_gone_after_a_trace():
    before = [patch.resolve_target()[2] for patch in patches.PATCHES]
    step.record_step(dataclasses.replace(SMALL, mode="qlora", peft=LORA, optimizer_steps=1))
    with pytest.raises(TraceUnavailable):
        step.record_step(dataclasses.replace(SMALL, optimizer="unknown"))
    for patch, one in zip(patches.PATCHES, before, strict=True):
        assert patch.resolve_target()[2] is one


@pytest.mark.parametrize("double_quant", [True, False])
def test_an_nf4_twin_has_the_bytes_of_a_layer_that_bitsandbytes_quantised(double_quant):
    import bitsandbytes as bnb

    real = bnb.nn.Linear4bit(192, 640, bias=False, compute_dtype=torch.bfloat16, compress_statistics=double_quant)
    real.load_state_dict({"weight": torch.randn(640, 192)})
    real = real.to("cpu")
    state = real.weight.quant_state
    if state is None:  # older versions quantise on an accelerator alone; the same function by hand
        _, state = bnb.functional.quantize_4bit(torch.randn(640, 192), compress_statistics=double_quant)
    tensors = [state.absmax, state.code]
    if double_quant:
        tensors += [state.offset, state.state2.absmax, state.state2.code]
    bytes_of = sum(tensor.nbytes for tensor in tensors) + 640 * 192 // 2
    assert not double_quant or nf4_bytes(640 * 192) == bytes_of  # the estimate's
    fake = build.fake_nf4(nn.Linear(192, 640, bias=False), dataclasses.replace(SMALL, double_quant=double_quant))
    assert sum(one.nbytes for one in (*fake.parameters(), *fake.buffers())) == bytes_of


def test_an_nf4_twin_saves_nothing_and_passes_gradients_of_the_inputs_type():
    fake = build.fake_nf4(nn.Linear(64, 128), SMALL).to_empty(device="cpu")
    hidden = torch.randn(3, 64, dtype=torch.float32, requires_grad=True)
    out = fake(hidden)
    assert (fake.bias.dtype, fake.bias.requires_grad) == (torch.bfloat16, False)
    assert (out.shape, out.dtype) == ((3, 128), torch.float32)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        fake(hidden)
    assert not saved
    out.sum().backward()
    assert hidden.grad.shape == hidden.shape


def test_the_engine_sums_gradients_in_place_and_the_log_knows():
    """A leaf used twice: the engine's sum lives where the first gradient lived; fake tensors would need a third."""
    seen: list[int] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, g):
            new = torch.ones(1 << 20)
            seen.append(new.data_ptr())
            return new

    leaf = torch.zeros(1 << 20, requires_grad=True)
    (Twice.apply(leaf) + Twice.apply(leaf)).backward()
    assert leaf.grad.data_ptr() in seen
    with FakeTensorMode(), StorageLog() as log:
        leaf = torch.zeros(1 << 20, requires_grad=True)
        total = leaf.cos().sum() + leaf.sin().sum()
        log.start_phase("backward")
        start = len(log.events)
        total.backward()
    births = [nbytes for kind, _, nbytes, _ in log.events[start:] if kind == ALLOC and nbytes == 4 << 20]
    # cos: sin(x), its negative, times the gradient; sin: cos(x), times the gradient; no sixth for the sum
    assert len(births) == 5


def test_dropout_keeps_a_mask_of_one_byte():
    log = StorageLog()
    with patches.install_patches(patches.TraceState(SMALL, log)), FakeTensorMode(), log:
        x = torch.zeros(1000, requires_grad=True)
        before = log.current
        out = F.dropout(x, 0.5)
        assert log.current - before == 4000 + 1000
    real, mask = torch.ops.aten.native_dropout(torch.ones(1000), 0.5, True)
    assert (real.dtype, mask.element_size()) == (torch.float32, 1)
    assert out.shape == (1000,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_takes_layer_norm_and_powers_in_fp32_as_cuda_does(dtype):
    half, norm = torch.randn(4, 8, dtype=dtype), torch.nn.LayerNorm(8).to(dtype)
    expected = torch.nn.functional.layer_norm(half.float(), (8,), norm.weight.float(), norm.bias.float())
    with patches.install_patches(patches.TraceState(SMALL, StorageLog())):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = norm(half), torch.pow(half, 3.0)
        outside = norm(half), torch.pow(half, 3.0)
    assert [one.dtype for one in (*inside, *outside)] == [torch.float32] * 2 + [dtype] * 2
    torch.testing.assert_close(inside[0], expected)
    torch.testing.assert_close(inside[1], half.float() ** 3)


@pytest.mark.parametrize(("mask", "is_square"), [("ones", False), ("padded", True), ("packed", True), ("none", False)])
def test_masks_are_those_that_transformers_makes_of_real_values(mask, is_square):
    """Real values without any patch against patches without values: the mask's shape, or none."""
    config = build.language_model_config(SMALL)
    config._attn_implementation = "sdpa"
    embeds = torch.zeros(2, 12, 64)
    real = {"ones": torch.ones(2, 12, dtype=torch.long), "padded": torch.ones(2, 12, dtype=torch.long)}
    real["padded"][1, 9:] = 0
    packed = torch.tensor([[*range(7), *range(5)]] * 2)
    given = {"attention_mask": real.get(mask), "position_ids": packed if mask == "packed" else None}

    def made() -> object:
        found = masking_utils.create_causal_mask(config, embeds, past_key_values=None, **given)
        return None if found is None else (tuple(found.shape), found.dtype)

    expected = made()
    with patches.install_patches(patches.TraceState(dataclasses.replace(SMALL, mask=mask), StorageLog())):
        assert made() == expected
    assert (expected is not None) == is_square


@pytest.mark.parametrize("elements", [1000, 4096, 70_000, 200_000])
def test_8bit_states_are_those_that_bitsandbytes_makes(elements):
    import bitsandbytes as bnb

    parameter = nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.zeros(elements)
    optimizer = bnb.optim.AdamW8bit([parameter])
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    state = optimizer.state[parameter]
    real = [state[name].nbytes for name in ("state1", "state2", "absmax1", "absmax2") if name in state]
    assert list(build.adam_8bit_state_sizes(elements)) == real
    assert sum(build.paged_adam_8bit_state_sizes(elements)) == (sum(real) if elements < 1e5 else sum(real[2:]))


def test_buckets_are_cut_as_pytorch_cuts_them():
    shapes = [(300_000,), (100,), (7_000_000,), (64, 64), (2_000_000,), (5,), (9_000_000,)]
    tensors = [torch.empty(shape, dtype=torch.float32 if i % 3 else torch.bfloat16) for i, shape in enumerate(shapes)]
    limits = [1 << 20, 25 << 20]
    cut, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors))
    ours = step.bucket_sizes([(str(one.dtype), one.nbytes) for one in tensors], limits)
    assert sorted(ours) == sorted(sum(tensors[i].nbytes for i in bucket) for bucket in cut)


SHARDED = {
    "fsdp2 full": {"strategy": "fsdp2"},
    "fsdp2 lora": {"strategy": "fsdp2", "mode": "lora", "peft": LORA},
    "fsdp2 qlora": {"strategy": "fsdp2", "mode": "qlora", "peft": LORA, "quant_storage": "bfloat16"},
    "fsdp1 full": {"strategy": "fsdp1", "mixed_precision": None, "autocast": None},
    "fsdp1 lora": {"strategy": "fsdp1", "mode": "lora", "peft": LORA, "mixed_precision": None, "autocast": None,
                   "reentrant": True, "checkpoints_wrappers": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def real_ranks(tmp_path_factory) -> dict[str, dict[str, int]]:
    """Phase peaks of rank 0 of two real processes over gloo."""
    found: dict[str, dict[str, int]] = found_by_ranks("tests.ranks_trace", folder=tmp_path_factory.mktemp("ranks"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_step_in_one_process_is_that_of_a_rank_of_two(name, real_ranks):
    """Equal bytes, but for gloo's threads: they may hold the buffer of the last collective a little longer."""
    fake, real = phase_peaks(step.record_step(changed({"world": 2, **SHARDED[name]}))), real_ranks[name]
    assert (fake["build"], fake.keys()) == (real["build"], real.keys())
    largest = 2 * (2 * 1000 * 64 + 64)  # the embedding's, the head's and the last norm's gradients in bf16
    for phase, peak in fake.items():
        assert peak - 512 <= real[phase] <= peak + largest, phase
    assert sum(real[phase] - peak for phase, peak in fake.items()) <= 2 * largest


def test_gathered_units_and_reduced_gradients_belong_to_streams_of_their_own():
    log = step.record_step(dataclasses.replace(SMALL, world=2, strategy="fsdp2"))
    own, gathered, reduced = sorted({one[3] for one in log.events if one[0] == ALLOC})  # in the order that they are met
    assert (own, sum(one[2] for one in log.events if one[0] == ALLOC and one[3] == gathered) > 0) == (0, True)
    live: dict[object, tuple[int, int]] = {}
    for kind, key, number, stream in log.events:
        if kind == ALLOC:
            live[key] = (stream, number)
        elif kind == FREE:
            live.pop(key)
        elif kind == PHASE_START and key == "optimizer":
            break
    alive = Counter()
    for stream, number in live.values():
        alive[stream] += number
    assert alive[gathered] == 0
    # this rank's half of fp32 gradients; a norm of 64 and a vocabulary of 1000 divide evenly
    assert alive[reduced] == 4 * parse_model_shape(LLAMA, name="m").params // 2
    assert not [one for one in log.events if one[0] == USED]  # FSDP2 waits by events and tells the allocator nothing


@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_a_trace_says_the_larger_of_the_allocators_two_ways(strategy):
    settings = dataclasses.replace(SMALL, world=2 if strategy == "fsdp2" else 1, strategy=strategy)
    fixed = step.trace_step(settings)
    growing = step.trace_step(to_script_settings(settings, expandable_segments=True))
    assert fixed.reserved_either == growing.reserved_either == max(fixed.reserved, growing.reserved)
    assert fixed.reserved != growing.reserved  # pages of 20 MiB, where small segments are of 2


def test_ddp_adds_one_copy_of_the_trained_gradients():
    single, ddp = (step.trace_step(dataclasses.replace(SMALL, strategy=name, world=2)) for name in ("single", "ddp"))
    gradients = 2 * parse_model_shape(LLAMA, name="m").params
    assert gradients <= ddp.allocated - single.allocated < 1.05 * gradients + 4096


@pytest.mark.parametrize(("changes", "words"), [
    ({"model": {"model_type": "no_such_model"}}, "no_such_model"),
    ({"model": {"model_type": "t5"}}, "causal language model"),
    ({"optimizer": "adam_of_tomorrow"}, "adam_of_tomorrow"),
    ({"mode": "lora", "peft": {"peft_type": "MAGIC"}}, "MAGIC"),
])  # fmt: skip
def test_what_cannot_be_traced_says_why(changes, words):
    with pytest.raises(TraceUnavailable, match=words):
        step.trace_step(dataclasses.replace(SMALL, **changes))


def test_adapters_that_peft_refuses_are_an_error_and_our_own_faults_keep_their_traceback(monkeypatch):
    refused = dataclasses.replace(SMALL, mode="lora", peft={**LORA, "target_modules": ["no_such_layer"]})
    with pytest.raises(ModelError, match=r"PEFT refuses the adapters: .*no_such_layer"):
        step.trace_step(refused)
    monkeypatch.setitem(build.LOSS_SETUPS, "chunked", lambda base: {}["ours"])
    monkeypatch.setattr(step, "__file__", __file__)
    with pytest.raises(KeyError):
        step.trace_step(SMALL)


def test_a_trace_is_remembered_by_settings_and_versions(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    first = cached_trace(SMALL)
    (file,) = (tmp_path / "traces").iterdir()
    monkeypatch.setattr(step, "trace_step", lambda settings: pytest.fail("traced again"))
    assert cached_trace(SMALL) == first
    monkeypatch.setattr(step, "trace_step", lambda settings: dataclasses.replace(first, allocated=1))
    assert cached_trace(dataclasses.replace(SMALL, seq_len=32)).allocated == 1
    file.write_text("{")
    assert cached_trace(SMALL).allocated == 1
    monkeypatch.setattr(step, "trace_step", lambda settings: first)
    assert cached_trace(SMALL).allocated == 1
    monkeypatch.setattr("sft_play.machine.software.installed_version", lambda library: "99")
    assert cached_trace(SMALL).allocated == first.allocated != 1
