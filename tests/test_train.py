"""Training for real, on tiny models: equal numbers, resuming, gradients, and every refusal before a weight is read."""

import json
import shlex
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration, GenerationConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralForCausalLM

from sft_play.errors import TrainingError
from sft_play.runs.folder import RunFolder, first_start_date
from sft_play.training.checkpoints import checkpoints
from sft_play.training.loop import trainer
from sft_play.training.loop.callbacks import GradientCheck
from sft_play.training.loop.loop import PlannedLoop
from tests.conftest import chat, write_rows
from tests.models import make_llama, make_tokenizer

pytestmark = pytest.mark.build


@pytest.fixture
def run_yaml(tmp_path, tiny_llama, sums):
    """A run of two optimizer steps on sums; more is set by overrides."""
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{name: {tiny_llama}, max_seq_len: 64}}\n"
        f"data: {{train_path: {sums}, val_path: null, test_path: null, val_fraction: 0.2}}\n"
        "train: {effective_batch_size: 8, max_steps: 2, learning_rate: 1e-2, gradient_checkpointing: false,\n"
        "        report_to: [], warmup_steps: 0}\n"
        "eval: {before_training: false, steps: 0}\n"
        f"output: {{dir: {tmp_path}/outputs}}\n"
    )
    return path


@pytest.fixture
def train(command, run_yaml, tmp_path):
    """Trains with overrides under a run name: (exit code, printed text, run folder)."""

    def run(name: str, *overrides: str, verb: str = "train") -> tuple[int, str, Path]:
        code, printed = command(verb, "--config", str(run_yaml), f"output.name={name}", *overrides)
        return code, printed, tmp_path / "outputs" / name

    return run


@pytest.fixture
def trained(train):
    """Trains as `train` does, to a good end; returns the run folder."""

    def run(*words: str, **options: str) -> Path:
        code, printed, folder = train(*words, **options)
        assert code == 0, printed
        return folder

    return run


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def logged(folder: Path, name: str) -> list[float]:
    return [line[name] for line in metrics(folder) if name in line]


def losses(folder: Path) -> list[float]:
    return logged(folder, "loss")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = [*folder.glob("adapter/*.safetensors"), *folder.glob("model/*.safetensors")]
    return load_file(file)


def assert_resumes(trained, *given: str, stop: int = 2) -> tuple[Path, Path]:
    """A run that is stopped and resumed has the losses and weights of an unbroken one, to the bit; both folders."""
    whole = trained("whole", *given)
    trained("parts", *given, f"train.stop_after_steps={stop}")
    parts = trained("parts", *given, verb="resume")
    assert losses(parts) == losses(whole)
    assert_same_bits(weights(parts), weights(whole))
    return whole, parts


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("mode", ["qlora", "lora", "full"])
def test_a_run_writes_its_whole_folder(train, mode):
    words = ("train.report_to=[tensorboard]", "eval.before_training=true")
    code, printed, folder = train("one", f"tuning.mode={mode}", *words)
    assert code == 0, printed
    kind = "model" if mode == "full" else "adapter"
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "resolved.json", "plan.json", "manifest.json", "summary.json", "metrics.jsonl", "train.log",
        "tb", "checkpoints", "report.html", kind,
    }  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) >= {"before", "after", "peak_bytes", "tokens_per_s", "steps", "wall_s", "exit"}
    assert set(summary["before"]) == {"loss", "exact_match", "rows", "generated_rows"}
    assert summary["before"]["exact_match"] is None
    assert summary["after"]["loss"] < summary["before"]["loss"]
    assert (summary["steps"], summary["exit"]) == (2, 0)
    peak = summary["peak_bytes"]
    assert (peak["measured_rss"] > 0, peak["measured_allocated"], peak["predicted_allocated"] > 0) == (True, None, True)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["status"], manifest["seed"], "template_date" in manifest) == ("finished", 42, False)
    assert (manifest["versions"]["torch"], len(manifest["data"]["train"]["sha256"])) == (torch.__version__, 64)
    assert "Starting new bnb run with fp32 precision on the CPU" in printed
    assert json.loads((folder / "plan.json").read_text())["effective_batch"] == 8
    assert losses(folder)[1] < losses(folder)[0]
    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    assert [scalar.value for scalar in events.Scalars("train/loss")] == pytest.approx(losses(folder))
    if mode == "full":
        end = AutoTokenizer.from_pretrained(folder / kind).convert_tokens_to_ids("<|im_end|>")
        stops = GenerationConfig.from_pretrained(folder / kind).eos_token_id
        assert end in (stops if isinstance(stops, list) else [stops])  # what ends a turn ends an answer of the model


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_one_times_eight_equals_eight_times_one(trained, tmp_path, mode):
    """Eight rows, one with a long answer: the mean is over tokens, however they are split into micro-batches."""
    rows = [chat("hello", "yes no yes no yes no yes no"), *(chat(f"what is {n}?", "no") for n in range(7))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    same = [f"data.train_path={path}", "data.val_fraction=0.0", f"tuning.mode={mode}", "train.max_steps=3"]
    one, eight = (trained(f"by-{size}", *same, f"train.batch_size={size}") for size in (1, 8))
    assert json.loads((one / "plan.json").read_text())["grad_accum"] == 8
    assert losses(one) == pytest.approx(losses(eight), rel=1e-4)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(tensor, weights(eight)[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["qlora", "full"])
def test_a_stopped_and_resumed_run_equals_an_unbroken_one_bit_for_bit(trained, mode):
    same = [
        *(f"tuning.mode={mode}", "train.max_steps=4", "train.batch_size=4", "tuning.lora.dropout=0.1"),
        *("train.lr_scheduler_type=linear", "eval.steps=1", "eval.generate_rows=2", "eval.max_new_tokens=4"),
    ]
    whole, parts = assert_resumes(trained, *same)
    assert [line["step"] for line in metrics(parts) if "loss" in line] == [1, 2, 3, 4]
    last = [folder / "checkpoints" / "checkpoint-4" / "optimizer.pt" for folder in (whole, parts)]
    one, other = (torch.load(path, weights_only=True)["state"] for path in last)
    assert one.keys() == other.keys()
    for index, state in one.items():
        assert_same_bits(*({key: torch.as_tensor(one) for key, one in of.items()} for of in (state, other[index])))


def test_a_run_stopped_at_the_end_of_an_epoch_resumes_to_the_same_numbers(trained):
    """The stop falls on the epoch's last step, before its evaluation, and between two logged losses. Rows come from
    workers."""
    same = ["tuning.mode=lora", "train.max_steps=9", "eval.steps=null", "tuning.lora.dropout=0.1",
            "train.save_steps=null", "train.logging_steps=4", "train.dataloader_num_workers=2"]  # fmt: skip
    whole, parts = assert_resumes(trained, *same, stop=6)
    assert next(line["step"] for line in metrics(whole) if "eval_loss" in line) == 6
    for name in ("num_tokens", "samples_seen", "eval_test_num_tokens", "eval_num_tokens"):  # counted on
        assert logged(whole, name) == logged(parts, name), name
    assert logged(whole, "num_tokens")[-1] > logged(whole, "num_tokens")[0] > 0
    assert logged(parts, "train_loss")[-1] == pytest.approx(logged(whole, "train_loss")[-1])


def test_the_command_that_is_printed_goes_on_with_the_run(train, succeed, tmp_path):
    _, printed, folder = train("one", "tuning.mode=lora", "train.max_steps=4", "train.stop_after_steps=2")
    (line,) = [line for line in printed.splitlines() if "make resume" in line]
    given = dict(word.split("=", 1) for word in shlex.split(line.partition("make resume ")[2]))
    assert json.loads((folder / "manifest.json").read_text())["status"] == "stopped"
    assert not (folder / "adapter").exists()
    printed = succeed("resume", "--config", given["CONFIG"], "--run", given["RUN"], *shlex.split(given["SET"]))
    assert "Resuming bnb run from step 2" in printed
    assert "Steps: 2 of 4, after a resume, in " in printed
    assert json.loads((folder / "summary.json").read_text())["steps"] == 4


def test_the_short_command_goes_on_with_the_settings_of_the_start(run_yaml, succeed, tmp_path, monkeypatch):
    """By its name where runs are looked for, or by its path; under SET that is given now for what may change."""
    monkeypatch.chdir(tmp_path)
    run_yaml.write_text(run_yaml.read_text().replace(f"output: {{dir: {tmp_path}/outputs}}\n", ""))
    given = ("tuning.mode=lora", "train.max_steps=4", "train.learning_rate=3e-3", "tuning.lora.r=4", "output.name=one")
    printed = succeed("train", "--config", str(run_yaml), *given, "train.stop_after_steps=1")
    (line,) = [line for line in printed.splitlines() if "make resume" in line]
    assert line.endswith("resume with: make resume RUN=one")
    for run, more in (("one", ("train.stop_after_steps=1",)), (str(tmp_path / "outputs" / "one"), ())):
        succeed("resume", "--run", run, *more)
    settings = json.loads((tmp_path / "outputs" / "one" / "resolved.json").read_text())
    assert (settings["tuning"]["lora"]["r"], settings["train"]["learning_rate"]) == (4, 3e-3)
    assert json.loads((tmp_path / "outputs" / "one" / "summary.json").read_text())["steps"] == 4


@pytest.mark.parametrize("whole", [(), ("config", "dir")])
def test_a_run_and_its_config_are_named_from_the_current_folder_on(run_yaml, succeed, tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    here = f"{tmp_path}/"
    text = run_yaml.read_text()
    assert f"dir: {here}outputs" in text
    run_yaml.write_text(text if "dir" in whole else text.replace(f"dir: {here}", "dir: "))
    config = f"{here if 'config' in whole else ''}run.yaml"
    given = ("--config", config, "tuning.mode=lora", "train.max_steps=3", "output.name=one")
    said = {}
    for verb in ("plan", "check", "train"):
        said[verb] = succeed(verb, *given, *(["train.stop_after_steps=1"] if verb == "train" else []))
    said["log"] = (tmp_path / "outputs" / "one" / "train.log").read_text()
    manifest = json.loads((tmp_path / "outputs" / "one" / "manifest.json").read_text())
    assert manifest["config_path"] == f"{here}run.yaml"
    for verb in ("memory-check", "report"):
        for before in ("", "outputs/", "./outputs/", f"{here}outputs/"):
            said[verb + before] = succeed(verb, "--run", f"{before}one")
            assert "outputs/one" in said[verb + before]
    said["resume"] = succeed("resume", "--run", f"{here}outputs/one", "train.stop_after_steps=1")
    said["newest"] = succeed("resume", "--config", config)  # found by its config, however that was named
    assert {name: text for name, text in said.items() if here in text} == {}


def test_a_run_that_lost_its_config_or_was_moved_is_resumed_by_its_folder(train, succeed, tmp_path, run_yaml):
    _, _, folder = train("one", "tuning.mode=lora", "train.max_steps=3", "train.stop_after_steps=1")
    moved = folder.rename(tmp_path / "elsewhere")
    run_yaml.unlink()
    succeed("resume", "--run", str(moved))
    assert json.loads((moved / "summary.json").read_text())["steps"] == 3


def test_a_run_does_not_go_on_with_other_base_weights(train, tmp_path):
    folder = make_llama(tmp_path / "base")
    same = [f"model.name={folder}", "tuning.mode=lora", "train.max_steps=4"]
    train("one", *same, "train.stop_after_steps=2")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    code, printed, _ = train("one", *same, verb="resume")
    assert (code, "data weights: the content of" in printed) == (2, True), printed


def test_a_full_run_of_a_mixture_of_experts_resumes_to_the_same_numbers(trained, tmp_path):
    """Experts have other names on the hub than in memory: a checkpoint under hub names would not be loaded again."""
    make_tokenizer(tmp_path)
    torch.manual_seed(0)
    config = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    assert_resumes(trained, f"model.name={tmp_path}", "tuning.mode=full", "train.max_steps=4")


SMALL = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}  # fmt: skip


def test_evaluating_before_and_while_training_changes_no_number(trained):
    """The trap of bitsandbytes on CPUs with AVX512-BF16: an evaluation repacks 4-bit weights, gradients stop."""
    evaluating = ["eval.before_training=true", "eval.steps=1", "eval.generate_rows=3", "eval.max_new_tokens=4"]
    silent, judged = (trained(name, "train.max_steps=3", *words) for name, words in (("a", []), ("b", evaluating)))
    assert losses(silent) == losses(judged)
    assert min(logged(silent, "grad_norm")) > 0
    assert logged(silent, "grad_norm") == logged(judged, "grad_norm")
    assert_same_bits(weights(silent), weights(judged))


def test_if_exists_resume_starts_goes_on_and_then_has_nothing_to_do(train):
    same = ["output.if_exists=resume", "train.max_steps=4"]
    assert train("one", *same, "train.stop_after_steps=3")[0] == 0
    code, printed, folder = train("one", *same)
    assert (code, "Resuming bnb run from step 3" in printed) == (0, True)
    code, printed, _ = train("one", *same)
    assert (code, "is finished; there is nothing to resume" in printed) == (0, True), printed
    assert json.loads((folder / "summary.json").read_text())["steps"] == 4


def test_checkpoints_are_kept_to_the_limit(trained):
    folder = trained("one", "train.max_steps=4", "train.save_steps=1", "train.save_total_limit=2") / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-3", "checkpoint-4"]
    assert len(checkpoints.complete_checkpoints(folder)) == 2


ANY_RATE = ("sft_play.config.validation.MAX_LEARNING_RATE", float("inf"))


def test_patience_is_not_begun_again_by_a_resume(train, trained, monkeypatch):
    """A learning rate that ruins the model: the first evaluation is the best one, whose weights are kept and loaded at
    the end, and patience ends the run. Others are stopped after two steps, and after the last one."""
    monkeypatch.setattr(*ANY_RATE)
    words = ["train.max_steps=8", "tuning.mode=lora", "train.learning_rate=30.0", "train.lr_scheduler_type=constant",
             "train.save_steps=1", "eval.steps=1", "train.load_best_model_at_end=true",
             "train.early_stopping_patience=2", "train.save_total_limit=1"]  # fmt: skip
    unbroken = trained("unbroken", *words)
    assert 2 < len(losses(unbroken)) < 8
    seen = {line["step"]: line["eval_loss"] for line in metrics(unbroken) if "eval_loss" in line and line["step"] > 0}
    best = min(seen, key=lambda step: seen[step])
    summary = json.loads((unbroken / "summary.json").read_text())
    assert summary["after"]["loss"] == pytest.approx(seen[best], rel=1e-4)
    assert (unbroken / "checkpoints" / f"checkpoint-{best}").is_dir()

    trained("early", *words, "train.stop_after_steps=2")
    with monkeypatch.context() as patch:
        patch.setattr("sft_play.training.run.build_summary", Mock(side_effect=TrainingError("ended here")))
        assert train("late", *words)[0] == 2
    for name in ("early", "late"):
        folder = trained(name, *words, verb="resume")
        assert losses(folder) == losses(unbroken)


class TestGradientCheck:
    state = SimpleNamespace(global_step=0)

    def test_a_trainable_tensor_without_gradient_stops_the_run_and_is_named(self):
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
        model["used"](torch.ones(1, 2)).sum().backward()
        with pytest.raises(TrainingError, match=r"2 of 4 trainable tensors.*unused\.weight, unused\.bias"):
            GradientCheck().on_pre_optimizer_step(None, self.state, None, model=model)
        (model["used"](torch.zeros(1, 2)).sum() + model["unused"](torch.ones(1, 2)).sum()).backward()
        model["used"].weight.grad.zero_()  # one of zeros is none
        with pytest.raises(TrainingError, match=r"used\.weight"):
            GradientCheck().on_pre_optimizer_step(None, self.state, None, model=model)

    def test_lora_a_is_looked_at_once_its_b_has_left_zero(self):
        model = get_peft_model(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"], r=1))
        check = GradientCheck()
        model(torch.ones(1, 2)).sum().backward()
        check.on_pre_optimizer_step(None, self.state, None, model=model)
        assert not check.is_done
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data += 1
            elif "lora_A" in name:
                parameter.grad = None
        with pytest.raises(TrainingError, match="lora_A"):
            check.on_pre_optimizer_step(None, self.state, None, model=model)
        model(torch.ones(1, 2)).sum().backward()
        check.on_pre_optimizer_step(None, self.state, None, model=model)
        assert check.is_done

    def test_a_run_that_its_learning_rate_broke_names_the_learning_rate(self, train, monkeypatch):
        """At the third step no gradient is left, or the loss is not a number."""
        monkeypatch.setattr(*ANY_RATE)
        code, printed, _ = train("one", "train.learning_rate=1e6", "train.max_steps=8", "train.on_nan=stop")
        assert (code, "start a new run with a lower train.learning_rate" in printed) == (2, True), printed

    def test_a_run_whose_frozen_layers_pass_no_gradient_stops(self, train, monkeypatch):
        """As the trap would do it: the first layer's adapters get nothing."""
        real = LlamaDecoderLayer.forward

        def cut(self, hidden_states, *args, **options):
            out = real(self, hidden_states, *args, **options)
            return out.detach().requires_grad_() if self.self_attn.layer_idx == 0 else out

        monkeypatch.setattr(LlamaDecoderLayer, "forward", cut)
        code, printed, _ = train("one", "tuning.mode=lora")
        assert (code, "trainable tensors have no gradient" in printed) == (2, True), printed
        assert "layers.0" in printed


def test_an_fp16_run_whose_first_steps_are_skipped_trains(train, monkeypatch):
    """Computed in fp16 as on a GPU: accelerate has it there alone, torch on a CPU too."""
    begin, arguments = Accelerator.__init__, trainer.training_arguments

    def begin_in_fp16(self, *args, **options):
        begin(self, *args, **options)
        self.state._mixed_precision, self.native_amp = "fp16", True
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    def told_so(*args, **options):
        made = arguments(*args, **options)
        made.fp16 = True
        return made

    monkeypatch.setattr(Accelerator, "__init__", begin_in_fp16)
    monkeypatch.setattr(trainer, "training_arguments", told_so)
    code, printed, folder = train("one", "tuning.mode=lora", "train.max_steps=12")
    assert (code, "Step 12 skipped" in printed) == (0, False), printed
    assert "Step 1 skipped: gradients not finite, which is how fp16 finds its loss scale" in printed
    assert losses(folder)[-1] < losses(folder)[0]


REFUSALS = {
    "D1": ("tuning.lora.target_modules=[query_key_value]", "The linear layers are: down_proj, gate_proj, k_proj"),
    "D2 targets": ("tuning.lora.target_modules=[q_proj, qproj]", "qproj matches nothing (did you mean q_proj?)"),
    "head": ("tuning.lora.target_modules=[lm_head]", "the output head, which takes no adapter"),
    "both": ("tuning.lora.modules_to_save=[q_proj]", "holds linear layers that get adapters"),
    "mesh": ("model.mesh_shape=[1, 3]", "(tuning.mode=lora can); use [[3], [fsdp]]"),
    "batch": ("train.batch_size=3", "use 6 or 9"),
    "flash": ("model.attn_implementation=flash_attention_2", "has kernels for GPUs, and this run uses the CPU"),
    "unsloth": ("tuning.backend=unsloth", "set tuning.backend_fallback=bnb"),
}


@pytest.mark.parametrize("case", sorted(REFUSALS))
def test_a_refusal_is_one_message_with_exit_code_2_and_nothing_is_left(train, tmp_path, case):
    override, message = REFUSALS[case]
    code, printed, _ = train("one", override)
    assert (code, printed.count("error:"), "Traceback" in printed, message in printed) == (2, 1, False, True), printed
    assert not (tmp_path / "outputs").exists() or not list((tmp_path / "outputs").iterdir())


def test_a_backend_that_falls_back_says_so_and_records_it(train):
    code, printed, folder = train("one", "tuning.backend=unsloth", "tuning.backend_fallback=bnb")
    assert (code, "warning: Backend: bnb instead of unsloth" in printed) == (0, True), printed
    assert "bnb instead of unsloth" in str(json.loads((folder / "manifest.json").read_text())["choices"])


def test_a_base_model_without_template_is_refused_before_all_rows_are_read(train, tmp_path):
    folder = make_llama(tmp_path / "base", template=None)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(chat("hello", "hello")) + "\n{not json\n")
    code, printed, _ = train("one", f"model.name={folder}", f"data.train_path={broken}")
    assert (code, "has no chat template" in printed, "not valid JSON" in printed) == (2, True, False), printed
    assert "chatml, plain" in printed
    code, printed, _ = train("one", f"model.name={folder}", "data.chat_template=plain", "train.max_steps=1")
    assert (code, "Chat template: the built-in plain" in printed) == (0, True), printed


def test_a_tokenizer_larger_than_the_model_resizes_only_where_it_is_trained(train, tmp_path):
    small, large = make_llama(tmp_path / "small", vocab_size=262), make_llama(tmp_path / "large", vocab_size=512)
    code, printed, _ = train("one", f"model.name={small}")
    assert (code, "modules_to_save=[embed_tokens, lm_head]" in printed) == (2, True), printed
    for name, folder in (("two", small), ("three", large)):  # a smaller one shrinks nothing
        code, printed, run = train(name, f"model.name={folder}", "tuning.mode=full", "train.max_steps=1")
        assert (code, "Embeddings: resized from 262 to" in printed) == (0, folder is small), printed
        rows = weights(run)["model.embed_tokens.weight"].shape[0]
        assert (rows > 262) if folder is small else (rows == 512)


def without_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def configured(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


GIT_LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
UNUSABLE = {
    "pickled": (pickled, "pickled weights can run code and are not read"),
    "a weight is missing": (without_a_weight, "do not match its config.json: model.layers.1.mlp.up_proj.weight"),
    "no head": (configured(tie_word_embeddings=False), "do not match its config.json: lm_head.weight"),
    "masked": (configured(architectures=["BertForMaskedLM"]), "not a causal language model"),
    "no such activation": (configured(hidden_act="nope"), "transformers cannot build a LlamaConfig"),
    "other shapes": (configured(hidden_size=32), "cannot be loaded"),
    "git lfs": (lambda folder: (folder / "model.safetensors").write_text(GIT_LFS), "cannot be loaded"),
}


@pytest.mark.parametrize("case", sorted(UNUSABLE))
def test_a_base_that_cannot_be_trained_is_refused_and_nothing_is_left(train, tmp_path, tiny_llama, case):
    change, message = UNUSABLE[case]
    folder = shutil.copytree(tiny_llama, tmp_path / "changed")
    change(folder)
    code, printed, run = train("one", f"model.name={folder}", "tuning.mode=lora")
    assert (code, message in printed, run.exists()) == (2, True, False), printed


def test_the_text_tower_of_an_image_text_model_is_trained(train, tmp_path):
    folder = tmp_path / "gemma"
    folder.mkdir()
    make_tokenizer(folder)
    text = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 32, "max_position_embeddings": 256}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision))
    whole.save_pretrained(folder)
    code, printed, run = train("one", f"model.name={folder}", "tuning.mode=full", "train.learning_rate=1e-12")
    assert (code, "only the language model of this gemma3 is trained" in printed) == (0, True), printed
    trained, source = weights(run), load_file(folder / "model.safetensors")
    assert trained.keys() == source.keys()
    for name, tensor in trained.items():
        is_text = "language_model" in name
        torch.testing.assert_close(tensor, source[name], rtol=0, atol=1e-6 if is_text else 0)
    again = Gemma3ForConditionalGeneration.from_pretrained(run / "model")
    assert type(again.config.vision_config) is type(whole.config.vision_config)


def test_plain_text_trains_every_token_and_mixed_runs_both_kinds(train, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("the light in the kitchen is on. " * 300)
    code, printed, _ = train("cpt", "task_mode=cpt", f"data.train_path={text}", "tuning.mode=full")
    assert (code, "packed into" in printed) == (0, True), printed
    code, printed, _ = train("mixed", "task_mode=cpt_mixed", f"data.text_path={text}", "data.text_fraction=0.3")
    assert (code, "0.3 of the sequences" in printed) == (0, True), printed


def test_the_day_that_a_template_writes_is_the_day_of_the_first_start(trained, tmp_path, monkeypatch):
    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    words = (f"data.chat_template={template}", "train.max_steps=1", "train.effective_batch_size=64")
    folder = trained("dated", *words)
    assert "rows are fewer than one effective batch of 64" in (folder / "train.log").read_text()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["template_date"] == str(date.today())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"template_date": "2001-02-03"}))
    assert first_start_date(RunFolder(folder)) == date(2001, 2, 3)


@pytest.mark.parametrize(("way", "save_steps"), [("renamed", 1), ("emptied", 500)])
def test_a_folder_that_goes_away_under_its_run_is_one_message(train, trained, monkeypatch, tmp_path, way, save_steps):
    real = PlannedLoop.training_step

    def takes_away(self, *arguments, **options):
        folder = tmp_path / "outputs" / "one"
        if self.state.global_step == 1 and (folder / "manifest.json").is_file():
            if way == "renamed":
                folder.rename(folder.with_name("other"))
            else:
                shutil.rmtree(folder)
                folder.mkdir()
        return real(self, *arguments, **options)

    monkeypatch.setattr(PlannedLoop, "training_step", takes_away)
    words = ("train.max_steps=3", f"train.save_steps={save_steps}", "tuning.mode=lora")
    code, said, folder = train("one", *words)
    assert (code, f"{folder} was removed or renamed while the run trained in it" in said) == (2, True), said
    assert (said.count("] error: "), "Traceback" in said, "could not be written" in said) == (1, False, False)
    if way == "renamed":  # and there it goes on
        trained("other", *words, verb="resume")
