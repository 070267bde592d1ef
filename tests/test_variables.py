"""Which command takes which variable and flag; the misspelt, the empty and other commands' are refused, not ignored."""

import ast
import itertools
import json
import os
import random
import re
import shlex
import subprocess

import pytest

from sft_play import variables
from sft_play.cli import main
from sft_play.commands import COMMAND_FILES, INTERNAL_COMMANDS
from sft_play.commands.request import flag_commands_table, read_request, refuse_make_variables
from sft_play.config.options import all_options
from sft_play.errors import ConfigError
from tests.conftest import ROOT, chat, write_rows, write_run
from tests.test_screens import texts

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
MAINTAINING = re.findall(r"^([a-z-]+):", (ROOT / "benchmarks/Makefile").read_text(encoding="utf-8"), re.MULTILINE)
TARGETS = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)
EVERY = sorted({*TARGETS, *MAINTAINING})
COMMAND = r"\bmake +(?:-C benchmarks +)?([a-z-]+)((?: +[A-Z_]+=(?:\"[^\"\n]*\"|'[^'\n]*'|\S*))+)"
"""`make TARGET NAME=…` as README, docs, configs, the Makefile's examples and our own messages write it."""
STARTER = "configs/run_starter.yaml"
OF_OTHERS = (
    *("CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HF_HOME", "OMP_NUM_THREADS", "NCCL_DEBUG", "WANDB_MODE", "MAKEFLAGS", "V"),
    *("TORCH_HOME", "PYTHONPATH", "TOKENIZERS_PARALLELISM", "SFT_PLAY_CACHE", "https_proxy", "PATH", "CC", "TMPDIR"),
)


def make(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    kept = {name: value for name, value in kept.items() if name not in variables.VARIABLES} | environment
    return subprocess.run(["make", *words], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=120)


def test_the_table_speaks_of_every_target_and_command():
    assert variables.all_targets() == set(EVERY)
    assert set(MAINTAINING) - set(TARGETS) == set(variables.MAINTENANCE_TARGETS)
    programs = {variables.target_command(name) for name in EVERY} - set(variables.MAKE_ONLY_COMMANDS)
    assert programs == set(COMMAND_FILES) == set(variables.COMMANDS)
    for name, variable in variables.VARIABLES.items():
        assert set(variable.commands) <= {*EVERY, "*"}, name
        assert set(variable.flag_only_commands) <= {*COMMAND_FILES, *INTERNAL_COMMANDS}, name
        assert variable.kind in ("text", "path", "names", "count", "number", "list", "switch", "launch"), name
    table = json.loads((ROOT / "sft_play" / "variables.json").read_text(encoding="utf-8"))
    rows = [*table["flags"].values(), *table["variables"].values()]
    texts = [*table["groups"].values(), *(row.get(key, "") for row in rows for key in ("for", "ranks"))]
    groups = {word for text in texts for word in text.split() if word.startswith("@")}
    assert len(groups) > 8
    assert all(map(variables._expand_names, groups))  # a misspelt group would be of no command
    assert not any(variables.takes_variable(name, "train") for name in variables.SETTING_BY_VARIABLE)


def test_every_command_that_the_papers_show_is_taken():
    files = [ROOT / "README.md", ROOT / "Makefile", *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.yaml")]
    files += [*ROOT.glob("sft_play/**/*.py"), *ROOT.glob("sft_play/**/*.yaml"), ROOT / "CHANGELOG.md"]
    found = 0
    for path in files:
        for target, rest in re.findall(COMMAND, path.read_text()):
            if target not in EVERY:
                continue
            names = re.findall(r"(?:^| )([A-Z_]+)=", re.sub(r"=(\"[^\"]*\"|'[^']*'|\S*)", "=", rest))
            found += 1
            assert variables.command_line_problem([target], names, []) is None, (path, target, names)
    assert found > 60


@pytest.mark.parametrize("target", ["train", "plan", "train-distributed", "eval", "fuzz", "setup", "help"])
def test_no_target_takes_a_misspelt_variable(target):
    """One letter left out, added, doubled or changed, two swapped, or another case, of every variable that it takes."""
    chance, tried = random.Random(7), 0
    for name in variables.VARIABLES:
        if not variables.takes_variable(name, target):
            continue
        assert variables.command_line_problem([target], [name], []) is None
        for wrong in misspelt(name, chance):
            if wrong not in variables.VARIABLES and wrong not in variables._FOREIGN_VARIABLES:
                tried += 1
                said = variables.command_line_problem([target], [wrong], []) or ""
                assert wrong in said
                assert len(name) <= 4 or f"did you mean {name}=?" in said, said
    assert tried


def misspelt(name: str, chance: random.Random) -> list[str]:
    place = chance.randrange(len(name) - 1) if len(name) > 1 else 0
    swapped = name[:place] + name[place + 1 : place + 2] + name[place] + name[place + 2 :]
    letter = chance.choice("QXZ")
    made = {name.lower(), name.title(), name[:place] + name[place + 1 :], name[:place] + letter + name[place:], swapped}
    return sorted(made - {name, ""})


@pytest.mark.parametrize("target", ["train", "plan", "help", "setup", "clean", "test"])
def test_variables_of_other_programs_pass_and_unknown_ones_do_not(target):
    for name in OF_OTHERS:
        assert variables.command_line_problem([target], [name], []) is None, name
    for name in ("BATCH_SIZE", "MODEL_NAME", "TRAIN_DATASET", "MAX_STEPS", "FOO", "ACCELERATE_CONFG", "lr"):
        said = variables.command_line_problem([target], [name], []) or ""
        assert said.startswith(f"{name}= is not a variable of make {target}")


def test_a_variable_of_another_target_is_refused_and_its_targets_are_named():
    for target, name in itertools.product(EVERY, variables.VARIABLES):
        said = variables.command_line_problem([target], [name], [])
        if variables.takes_variable(name, target):
            assert said is None
        else:
            assert said.startswith(f"{name}= is not used by make {target}; it belongs to make ")
            assert variables.takes_variable(name, re.findall(r"belongs to make (?:-C benchmarks )?([a-z-]+)", said)[0])


def test_a_section_of_the_run_yaml_that_has_a_variables_name_is_still_a_setting():
    both = {name.partition(".")[0].upper() for name in all_options()} & set(variables.VARIABLES)
    assert both == {"DATA", "MODEL", "OUTPUT"}
    assert set(variables.SETTING_BY_VARIABLE.values()) <= set(all_options())  # which a refusal names
    refuse_make_variables(["output={dir: elsewhere}"])
    with pytest.raises(ConfigError, match="variable of make"):
        refuse_make_variables(["OUTPUT=answers.jsonl"])


def test_a_variable_of_another_command_in_the_environment_is_not_judged(tmp_path, command, monkeypatch):
    answer = make("-n", "train", CONFIG="x", ROW="5", RUN="", config="y")
    assert (answer.returncode, answer.stderr) == (0, "")
    monkeypatch.setenv("BASE", "/home/me")  # of make merge, and of many a shell
    assert command("runs", "--config", STARTER, f"output.dir={tmp_path}")[0] == 0


def test_an_empty_value_is_refused_where_it_would_mean_the_default():
    for name, variable in variables.VARIABLES.items():
        target = next(one for one in EVERY if variables.takes_variable(name, one))
        said = variables.command_line_problem([target], [name], [name])
        assert (said is None) == (variable.kind in ("list", "switch")), name
    # several targets take what one of them takes
    assert variables.command_line_problem(["process", "train"], ["FORCE", "CONFIG"], []) is None
    said = variables.command_line_problem(["process", "train"], ["ROW"], []) or ""
    assert "ROW= is not used by make process train" in said


def test_other_words_name_targets_and_settings_that_there_are():
    for word, hint in variables.TARGET_HINTS.items():
        assert word not in variables.all_targets()
        assert variables.command_line_problem([word], [], []) == f"make {word}: there is no such target; {hint}"
        target, names = re.findall(r"make ([a-z]+)", hint)[0], re.findall("[A-Z]+(?==)", hint)
        assert variables.command_line_problem([target], names, []) is None
    assert set(variables.SETTING_SYNONYMS.values()) <= set(all_options())


@pytest.mark.parametrize(("words", "message"), [
    (["train", "CONFG=my.yaml"], "did you mean CONFIG=?"),
    (["train-distributed", "WORLD_SIZE=2"], "did you mean NNODES=?"),
    (["train", "CONFIG="], "CONFIG= is given and empty"),
    (["bench-data"], "make bench-data: that target is called as make -C benchmarks bench-data"),
    (["-C", "benchmarks", "benchdata"], "did you mean make -C benchmarks bench-data?"),
    (["-C", "benchmarks", "bench-data", "MUTANTS=2"], "MUTANTS= is not used by make bench-data; it belongs to"),
    (["train", "DATA=x"], "it belongs to make eval, make new (the setting: SET='data.train_path=...')"),
    (["-n", "train", "quo'te=1"], "quo'te= is not a variable"),
    (["tests"], "make tests: there is no such target; did you mean make test?"),  # a folder that there is
    (["docs"], "make docs: there is no such target; make help ALL=1 lists them"),
    # a file that there is: make would train the starter, and find nothing to do for the file
    (["train", "configs/run_bnb.yaml"], "a run YAML is given as CONFIG=configs/run_bnb.yaml"),
    (["trian", "CONFIG=my.yaml"], "did you mean make train?"), (["$(shell touch ran)'"], "there is no such target"),
    (["train", "SET=a=1", "SET=b=2"], "make keeps the last alone; give it once: SET='a=1 b=2'"),
    (["train", "LR=2e-4", "epochs=3"], "but a setting of the run YAML: SET='train.epochs=...'"),
])  # fmt: skip
def test_make_refuses_before_anything_runs(words, message, tmp_path):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\ntouch {shlex.quote(str(tmp_path / 'ran'))}\n")
    python.chmod(0o755)
    answer = make(*words, f"VENV={tmp_path}")
    assert (answer.returncode, message in answer.stderr) == (2, True), answer.stderr
    assert answer.stderr.count("***") == (2 if "-C" in words else 1)  # the outer make says that the inner failed
    assert not [folder for folder in (tmp_path, ROOT) if (folder / "ran").exists()]


VALUES = {"NPROC": "2", "NNODES": "1", "STRATEGY": "ddp", "GPUS": "0", "N": "2", "ROW": "2", "STEPS": "2", "PRICE": "2",
          "BUDGET": "2", "MAX": "seq_len", "WHATIF": "train.epochs=1"}  # fmt: skip


def words_of(flag: str) -> list[str]:
    name = flag.strip("-").upper()
    kind = variables.VARIABLES[name].kind if name in variables.VARIABLES else ""
    is_switch = kind == "switch" or flag in ("--deepspeed", "--tensorboard")
    return [flag] if is_switch else [flag, VALUES.get(name, "1")]


@pytest.mark.parametrize("command_name", sorted(COMMAND_FILES))
def test_a_command_takes_its_own_flags_and_no_others(command_name):
    config = ["--config", STARTER] if command_name in variables.flag_commands("CONFIG") else []
    taken = 0
    for flag, commands in flag_commands_table().items():
        if flag == "--config":
            continue
        if command_name in commands:
            read_request([command_name, *config, *words_of(flag)], {})
            taken += 1
        else:
            said = f"{flag} is not a flag of {command_name}; it belongs to {commands[0]}"
            with pytest.raises(ConfigError, match=said):
                read_request([command_name, *config, *words_of(flag)], {})
    assert taken


@pytest.mark.parametrize(("words", "message"), [
    (["plan", "--rwo", "5"], "plan has no flag --rwo; did you mean --row?"),
    (["plan", "--frobnicate"], "plan has no flag --frobnicate; sft-play plan --help lists its flags"),
    (["train", "--config", ""], "--config is given and empty"),
    (["plan", "--hardware", " "], "--hardware is given and empty"), (["train", "my.yaml"], "--config my.yaml"),
    (["finetune"], "there is no command finetune; here it is make train"),
    (["mask-score", "train.epochs=1"], "mask-score reads no run YAML"),
    (["train", "NPROC=2"], "NPROC=2 is a variable of make, not a setting"),
    (["merge", "FORCE=1"], "or in the environment, or as --force\n"),
    (["plan", "--model", "me/x", "--config", "a.yaml"], "MODEL=me/x and CONFIG=a.yaml are both given"),
    (["train", "config=my.yaml"], "config=my.yaml is a variable of make, not a setting"),
])  # fmt: skip
def test_wrong_flags_are_one_message(refuse, words, message):
    assert message in refuse(*words)


OWN = ("data.train_path=mine.jsonl", "data.val_path=mine.jsonl", "data.test_path=x.jsonl", "model.name=me/model",
       "model={name: me/model}", "data={train_path: mine.jsonl}", "task_mode=cpt")  # fmt: skip
HARMLESS = ("train.max_steps=2", "output.name=x", "model.max_seq_len=64", "data.val_path=null", "tuning.mode=lora")


@pytest.mark.parametrize("name", ["train", "plan"])
def test_without_a_config_the_starter_gets_nothing_of_the_users(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match="CONFIG is set and empty"):
        read_request([name], {"CONFIG": ""})
    for setting in OWN:
        for words, environment in (([name, setting], {}), ([name], {"SET": shlex.quote(setting)})):
            with pytest.raises(ConfigError, match=r"(?s)is given without a run YAML.*data: \{train_path: .*CONFIG=my"):
                read_request(words, environment)
        assert read_request([name, "--config", STARTER, setting], {}).overrides == (setting,)
    with pytest.raises(ConfigError, match=r'(?s)name: "me/model".*train_path: "mine.jsonl"'):
        read_request([name, "model.name=me/model", "data.train_path=mine.jsonl"], {})
    with pytest.raises(ConfigError, match=r"data\.train_path=mine/ is given without"):
        read_request([name, "--train-dataset", "mine/"], {})
    assert read_request([name, *HARMLESS], {}).overrides == HARMLESS
    request = read_request([name, "--config", STARTER, "--train-dataset", "/a b/c"], {})
    assert request.overrides == ('data.train_path="/a b/c"',)


def test_every_run_says_its_base_model_first(tmp_path, tiny_llama, succeed, monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = write_rows(tmp_path / "rows.jsonl", (chat(f"what is {n}?", f"it is {n}.") for n in range(8)))
    config = write_run(tmp_path, tiny_llama, rows, train={"max_steps": 1}, output={"name": "one"})
    for verb in ("launch-command", "train"):
        said = f"[{verb}] Base model: {tiny_llama} ({config})\n"
        assert succeed(verb, "--config", str(config)).startswith(said)
    log = (tmp_path / "outputs" / "one" / "train.log").read_text(encoding="utf-8")
    assert f"Base model: {tiny_llama}" in log.splitlines()[0]
    said = "[launch-command] Base model: sft-play/starter-base, the starter's"
    assert succeed("launch-command", f"output.dir={tmp_path}").startswith(said)


def test_a_model_is_planned_with_default_settings_in_place_of_a_config(succeed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("plan", "--model", "Qwen/Qwen2.5-0.5B-Instruct", "--hardware", "1xRTX3060")
    planned = json.loads(succeed(*words, "--json", "train.effective_batch_size=8", "--whatif", "train.max_steps=5,6"))
    assert (planned["effective_batch"], planned["launch"], len(planned["whatif"])) == (8, None, 2)
    assert "make new MODEL=Qwen/Qwen2.5-0.5B-Instruct DATA=my.jsonl HARDWARE=1xRTX3060" in succeed(*words)
    assert list(tmp_path.iterdir()) == []


# --- commands in texts ------------------------------------------------------------------------------------------------
SPELLED = {
    "make plan ... WHY=1": "sft-play plan ... --why",
    "RUNS= names no run; make runs lists them: make prune RUNS='first second'":
        "RUNS= names no run; sft-play runs lists them: sft-play prune --runs 'first second'",
    "(make plan MAX=...), or `make process`.": "(sft-play plan --max ...), or `sft-play process`.",
    "make train CONFIG=my.yaml 'SET=a.b=1 c.d=\"x y\"'.": "sft-play train --config my.yaml a.b=1 'c.d=x y'.",
    "make train-tb TB_PORT=6007, then": "TB_PORT=6007 sft-play train --tensorboard, then",
    "make preview ROW=… shows": "sft-play preview --row … shows",
    "make merge RUN=outputs/x FORCE=1 writes": "sft-play merge --run outputs/x --force writes",
    "make setup (with VENV=: …)": "make setup in a checkout (with VENV=: …)",
    "make -C benchmarks lock TORCH=X": "make -C benchmarks lock TORCH=X in a checkout",
    "how to make new friends, make this, make plans": "how to make new friends, make this, make plans",
}  # fmt: skip
"""Texts, and what a user without a Makefile reads."""


@pytest.fixture
def far_from_make(monkeypatch):
    monkeypatch.setattr(variables, "is_makefile_near", lambda: False)


def test_commands_are_the_programs_where_no_makefile_is_near(far_from_make, monkeypatch, tmp_path, capsys):
    assert {text: variables.spell_commands(text) for text in SPELLED} == SPELLED
    assert main(["resume", "--config", str(ROOT / STARTER), f"output.dir={tmp_path}"]) == 2
    assert "start one with sft-play train --config " in capsys.readouterr().err
    monkeypatch.undo()
    assert [variables.is_makefile_near(), monkeypatch.chdir(tmp_path), variables.is_makefile_near()] == [
        True,
        None,
        False,
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_spelled_command_asks_for_what_makes_did(seed, far_from_make):
    draw = random.Random(seed)
    values = ["a b", "it's", 'say "hi"', "$HOME", "50%", "größe", "x=y", "a,b", "(c);", "back\\slash"]
    for command in (name for name, row in variables.COMMAND_ROWS.items() if row["file"] != "developing"):
        environment = {}
        for name in variables.VARIABLES:
            kind = variables.VARIABLES[name].kind
            if (
                variables.takes_variable(name, command)
                and kind not in ("launch", "number", "count")
                and draw.random() < 0.3
            ):
                environment[name] = "1" if kind == "switch" else draw.choice(values)
        if "SET" in environment:
            environment["SET"] = shlex.join(f"output.name={text}" for text in draw.sample(values, 2))
        if "MODEL" in environment and "CONFIG" in environment:
            del environment["CONFIG"]
        if not environment:
            continue
        line = shlex.join(["make", command, *(f"{name}={text}" for name, text in environment.items())])
        words = shlex.split(variables.spell_commands(line))
        place = words.index("sft-play")
        before = dict(word.split("=", 1) for word in words[:place])
        assert read_request(words[place + 1 :], before) == read_request([command], environment), line


def test_every_command_that_a_text_of_the_package_names_can_be_typed(far_from_make):
    named = 0
    for path in (ROOT / "sft_play").rglob("*.py"):
        for text in texts(ast.parse(path.read_text(encoding="utf-8"))):
            for match in variables._MAKE_COMMAND.finditer(text.replace("{}", "x")):
                spelled = variables._spell_command(match)
                command, *words = shlex.split(spelled.partition("sft-play ")[2]) or ["", ""]
                assert command or spelled.endswith("in a checkout"), spelled
                flags = [word for word in words if word.startswith("--")]
                assert all(
                    command in flag_commands_table()[flag.replace("-", "_").replace("__", "--", 1)] for flag in flags
                ), text
                named += 1
    assert named > 90
