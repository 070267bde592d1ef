"""The model card, and `make push`: what is uploaded, what is asked first, and what is never in it."""

import contextlib
import io
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from sft_play.errors import ConfigError
from sft_play.finished.export.merge import card_facts, merge_run
from sft_play.finished.export.push import plan_upload
from sft_play.finished.respond import build_run_renderer, load_model_folder, load_trained_model
from sft_play.finished.run import find_finished_run
from sft_play.training.checkpoints import card
from sft_play.training.prepare.model_spec import build_model_spec
from sft_play.training.prepare.tokenizer import added_token_rows, load_tokenizer
from tests.conftest import chat, write_rows, write_run
from tests.finished_runs import finished_run, make_base
from tests.test_merge import gemma3_with_images, llama, logits

pytestmark = pytest.mark.build
KINDS = {
    "lora": (llama, {}),
    "qlora": (llama, {"mode": "qlora", "precision": "bf16"}),
    "full": (llama, {"mode": "full"}),
    "dora and a larger vocabulary": (lambda: llama(vocab_size=300), {
        "use_dora": True, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "text tower": (gemma3_with_images, {}),
}  # fmt: skip
SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyz12345678"


def facts_of(run) -> card.CardFacts:
    """What the card of a fabricated run says."""
    tokenizer = load_tokenizer(run.config).tokenizer
    size, new_rows = len(tokenizer), added_token_rows(tokenizer, run.config)
    spec = build_model_spec(run.config, run.plan().precision, tokenizer_size=size, new_rows=new_rows)
    stop = card.answer_stop_ids(run.config, tokenizer, build_run_renderer(run, tokenizer))
    return card_facts(run, spec, stop, kind="adapter" if run.is_adapter else "model")


def run_of_kind(folder: Path, kind: str):
    """A finished run with its card, on a base of its own."""
    build, options = KINDS[kind]
    base = make_base(folder / f"base of {kind}", build())
    run = find_finished_run(folder, str(finished_run(folder / kind, base, **options)))
    (run.weights / "README.md").write_text(card.render_card(facts_of(run), card.describe_base(run.config)))
    return run


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with a run of an adapter and one of all weights."""
    folder = tmp_path_factory.mktemp("card")
    for kind in ("lora", "full"):
        run_of_kind(folder, kind)
    return folder


class Hub:
    """The calls of HfApi that push makes, on repositories in memory: {name: is_private}."""

    def __init__(self) -> None:
        self.repositories: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.commits = 0

    def whoami(self):
        return {"name": "me"}

    def model_info(self, repo):
        from huggingface_hub.errors import RepositoryNotFoundError

        if repo not in self.repositories:
            raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None, status_code=404))
        return SimpleNamespace(private=self.repositories[repo])

    def create_repo(self, repo, *, private, exist_ok):
        assert repo not in self.repositories
        self.repositories[repo] = private

    def create_commit(self, repo, operations, *, commit_message):
        for operation in operations:
            given = operation.path_or_fileobj
            self.files[operation.path_in_repo] = given if isinstance(given, bytes) else Path(given).read_bytes()
        self.commits += 1
        return SimpleNamespace(oid="0" * 40)

    def take_the_place(self, monkeypatch) -> None:
        """Of the real hub, with a token of its own."""
        for name in ("whoami", "model_info", "create_repo", "create_commit"):
            monkeypatch.setattr(f"huggingface_hub.HfApi.{name}", getattr(self, name))
        monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")


@pytest.fixture
def hub(monkeypatch) -> Hub:
    given = Hub()
    given.take_the_place(monkeypatch)
    return given


def snippet(text: str, **names: Path) -> str:
    """The card's Python with the folders in the place of the names, and without its last line, which prints."""
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    for name, path in names.items():
        code, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {str(path)!r}", code)
        assert count == 1
    return code


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("kind", KINDS)
def test_the_cards_code_loads_what_was_trained(tmp_path, kind):
    run = run_of_kind(tmp_path, kind)
    names = {"name": run.weights, **({"base": Path(run.config.model.name)} if run.is_adapter else {})}
    scope: dict[str, object] = {}
    exec(snippet((run.weights / "README.md").read_text(), **names), scope)
    expected = logits(load_trained_model(run))
    # bitsandbytes computes NF4 by another kernel on CPUs with AVX512-BF16, unless it is told not to, as training does
    tolerance = 0.02 if run.is_quantized else 1e-5
    torch.testing.assert_close(logits(scope["model"].eval()), expected, rtol=tolerance, atol=tolerance)
    if run.is_adapter:
        with scope["model"].disable_adapter():
            assert (logits(scope["model"]) - expected).abs().max() > 3 * tolerance
    assert scope["output"].shape[1] > scope["inputs"]["input_ids"].shape[1]
    assert scope["tokenizer"].chat_template
    if run.is_adapter:
        merged = merge_run(run)
        text = (merged.path / "README.md").read_text()
        scope = {}
        exec(snippet(text, name=merged.path), scope)
        assert torch.equal(logits(scope["model"].eval()), logits(load_model_folder(merged.path)))
        assert yaml.safe_load(text.split("---")[1])["library_name"] == "transformers"


def test_a_run_writes_its_card_with_figures_and_no_rows_paths_or_secrets(tmp_path, tiny_llama, succeed, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-value-of-mine")
    chats = (chat(f"what is {n} + {n}?", f"it is {2 * n}.") for n in range(40))
    rows, tuning = write_rows(tmp_path / "private rows.jsonl", chats), {"lora": {"r": 4, "alpha": 12}}
    options = {"data": {"val_fraction": 0.25}, "train": {"learning_rate": 1e-2}}
    options |= {"eval": {"generate_rows": 2, "max_new_tokens": 4}, "output": {"name": "s3cret-value-of-mine"}}
    succeed("train", "--config", str(write_run(tmp_path, tiny_llama, rows, tuning=tuning, **options)))
    folder = tmp_path / "outputs" / "s3cret-value-of-mine"
    text = (folder / "adapter" / "README.md").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    data = json.loads((folder / "manifest.json").read_text())["data"]
    assert f"| loss | {summary['before']['loss']:.4f} | {summary['after']['loss']:.4f} |" in text
    assert f"| exact match of 2 answers | {summary['before']['exact_match']:.1%} |" in text
    for split, count in (("train", 30), ("val", 10)):
        report = data[split]["report"]
        assert report["rows_kept"] == count
        assert f"| {split} | messages | {count} | {report['tokens']:,} | {report['tokens_trained']:,} |" in text
    for words in ("r 4, alpha 12", "| steps | 2 |", "| effective batch | 8 |", "0.01, cosine", "torch 2."):
        assert words in text
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "peft"
    assert not {"base_model", "language"} & set(front)  # a folder's name would be another model's on the hub
    unwanted = ("private rows", "what is", "s3cret-value-of-mine", "[More Information Needed]")
    assert not [words for words in (str(tmp_path), str(tiny_llama), *unwanted) if words in text]


def test_a_base_is_named_by_its_hub_id_or_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = make_base(tmp_path / "models--Some-Org--Some.Model-1B" / "snapshots" / "0123", llama())
    named = lambda folder: card.describe_base(SimpleNamespace(model=SimpleNamespace(name=str(folder), revision=None)))  # noqa: E731
    assert named(base) == card.CardBase("Some-Org/Some.Model-1B", True, {})
    plain = tmp_path / "plain"
    shutil.copytree(base, plain)
    assert named(plain) == card.CardBase("plain", False, {})
    config = json.loads((plain / "config.json").read_text())
    for recorded, wanted in (("Org/Model-7B", ("Org/Model-7B", True)), ("/home/me/model", ("plain", False))):
        (plain / "config.json").write_text(json.dumps(config | {"_name_or_path": recorded}))
        assert (named(plain).name, named(plain).is_on_hub) == wanted
    (plain / "README.md").write_text("---\nlicense: other\nlicense_name: mine\nlicense_link: https://x.y/z\n---\n")
    assert named(plain).license == {"license": "other", "license_name": "mine", "license_link": "https://x.y/z"}
    (plain / "README.md").write_text("---\nlicense: [\n---\n")
    assert named(plain).license == {}
    (plain / "config.json").write_text(json.dumps(config | {"license": "apache-2.0"}))
    assert named(plain).license == {"license": "apache-2.0"}
    assert card.describe_base(SimpleNamespace(model=SimpleNamespace(name="no-such/model", revision=None))).license == {}
    starter = SimpleNamespace(model=SimpleNamespace(name="sft-play/starter-base"))
    assert card.describe_base(starter) == card.CardBase("sft-play/starter-base", False, {})


def test_front_matter_names_base_licence_and_data_of_the_hub(world):
    run = find_finished_run(world, "lora")
    data = run.config.data.model_copy(update={"train_path": "hub:org/rows:main", "text_path": "texts/*.txt"})
    changed = replace(run, config=run.config.model_copy(update={"data": data}))
    text = card.render_card(facts_of(changed), card.CardBase("Org/Base", True, {"license": "apache-2.0"}))
    front = yaml.safe_load(text.split("---")[1])
    named = ("base_model", "license", "datasets", "pipeline_tag")
    assert [front[key] for key in named] == ["Org/Base", "apache-2.0", ["org/rows"], "text-generation"]
    assert 'base = "Org/Base"\n' in text
    assert card.REPOSITORY_PLACEHOLDER in text


BOTH = ("README.md", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
ADAPTER = sorted([*BOTH, "adapter_config.json", "adapter_model.safetensors"])
WHOLE = sorted([*BOTH, "config.json", "generation_config.json", "model.safetensors"])
MERGED = sorted([*WHOLE, "merge.json"])


@pytest.mark.parametrize(
    ("kind", "words", "files"), [("lora", [], ADAPTER), ("full", [], WHOLE), ("lora", ["--merged"], MERGED)]
)
def test_exactly_the_models_files_are_uploaded(world, hub, succeed, kind, words, files):
    run = find_finished_run(world, kind)
    if "--merged" in words:
        merge_run(run, replace=True)
    folder = run.folder.path / "merged" if "--merged" in words else run.weights
    for name in ("notes.txt", "rows.jsonl", "train.log", "optimizer.pt", "data/train.json", ".env"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(SECRET)
    printed = succeed("push", "--run", str(run.folder.path), "--repo", "me/it", "--yes", "--json", *words)
    answer = json.loads(printed.splitlines()[-1])
    assert sorted(hub.files) == files
    assert {one["name"]: one["bytes"] for one in answer["files"]} == {n: len(b) for n, b in hub.files.items()}
    assert answer["pushed"] is answer["private"] is answer["created"] is True
    assert (hub.repositories, hub.commits) == ({"me/it": True}, 1)
    weights = next(name for name in files if name.endswith(".safetensors"))
    assert hub.files[weights] == (folder / weights).read_bytes()
    for name in set(files) - {weights}:
        assert not [hidden for hidden in (str(world), "what is", SECRET) if hidden in hub.files[name].decode()], name
    assert 'name = "me/it"' in hub.files["README.md"].decode()
    if "adapter_config.json" in files:
        own = json.loads((folder / "adapter_config.json").read_text())
        assert json.loads(hub.files["adapter_config.json"]) == {**own, "base_model_name_or_path": f"base of {kind}"}


def test_it_asks_first_and_says_what_where_and_to_whom(world, hub, command, monkeypatch):
    words = ("push", "--run", str(world / "lora"), "--repo", "me/it")
    code, printed = command(*words)
    assert (code, "a new private repository" in printed) == (2, True)
    assert all(f"  {name} (" in printed for name in ADAPTER)
    asked = []
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    for reply, is_pushed in (("", False), ("no", False), ("yes", True)):
        monkeypatch.setattr("builtins.input", lambda question, reply=reply: asked.append(question) or reply)
        code, printed = command(*words, "--public")
        assert code == 0, printed
        assert bool(hub.files) is is_pushed
    assert "a new PUBLIC repository" in asked[0]
    assert hub.repositories == {"me/it": False}
    command(*words)
    assert "the existing PUBLIC repository is updated" in asked[-1]
    hub.commits = 0
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, printed = command(*words, "--yes")
    assert (code, hub.commits, "PUBLIC=1 has to confirm it" in printed) == (2, 0, True)
    assert (command(*words, "--yes", "--public")[0], hub.commits) == (0, 1)
    hub.repositories["me/it"] = True
    upload = plan_upload(find_finished_run(world, "lora"), "me/it", is_merged=False, is_public=True, is_confirmed=True)
    assert upload.is_private
    assert "stays so" in upload.notes[-1]


def test_what_cannot_be_uploaded_is_refused_in_one_message(world, hub, refuse, monkeypatch):
    def refused(message: str, *words: str) -> None:
        printed = refuse("push", "--run", str(world / "full"), "--yes", *words)
        assert message in printed
        assert len(printed.strip().splitlines()) == 1
        assert not hub.files

    for name in ("it", "a/b/c", "me/it now", "me/it.git"):
        refused("REPO=", "--repo", name)
    refused("leave MERGED=1 out", "--repo", "me/it", "--merged")
    monkeypatch.setattr("huggingface_hub.HfApi.whoami", lambda *_: (_ for _ in ()).throw(OSError("no network")))
    refused("the hub cannot be asked: no network", "--repo", "me/it")


@pytest.mark.parametrize(("file", "text", "words"), [
    ("README.md", "# Mine\n", None),  # which a person wrote
    ("README.md", "# It\n\nTrained on {world}/lora.jsonl\n", "names a path of this machine"),
    ("config.json", '{{"trained_in": "{world}/full"}}', "names a path of this machine"),
    ("README.md", f"# It\n\nMy token: {SECRET}\n", "looks like a password or a token"),
])  # fmt: skip
def test_a_text_with_a_path_or_a_secret_is_refused(world, hub, file, text, words):
    path = world / "full" / "model" / file
    before = path.read_text()
    path.write_text(text.format(world=world))
    run = find_finished_run(world, "full")
    try:
        with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
            upload = plan_upload(run, "me/it", is_merged=False, is_public=False, is_confirmed=True)
            assert upload.files[file] == text.encode()
    finally:
        path.write_text(before)
