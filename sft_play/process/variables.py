"""The variables of make, and the program's flags for them, in one table.

Make's check of its command line, `make help`, the program's flags and their help, its `Request` and the tests read it.
Standard library only, and nothing newer than Python 3.6: `scripts/check_variables.py` reads it with any Python, before
there is an environment.
"""

from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from sft_play.spelling import nearest, plain

TARGETS = {
    "train-tb": "train",
    "train-and-watch": "train",
    "train-distributed-tb": "train-distributed",
    "train-deepspeed-tb": "train-deepspeed",
}
"""Targets of make that run a command of another name."""
LAUNCHING = ("train-distributed", "train-deepspeed", "launch-command")
TRAINING = ("train", *LAUNCHING, "resume")
DESCRIBING = ("plan", "doctor", "render", "preview", "check", "full-pipeline")
"""Commands about the run that `train` with the same words would start."""
_FINISHED = (
    *("chat", "infer", "eval", "merge", "merge-test", "report", "reproduce", "ship", "export", "export-test", "serve"),
    "push",
)
"""Commands that work on a finished run."""
_LISTING = ("compare", "runs", "prune")
_DATA = ("process", "style", "dapt-docx", "render", "preview", "check", "full-pipeline")
_BOARDS = ("tensorboard", "tb-open", "tb-stop", "tb-clean")
_CONFIGURED = (
    *TRAINING,
    *("setup-accelerate", "plan", "launch-file", "verify-layouts", *_BOARDS, "doctor", "consolidate", "gpu-info"),
    *("memory-check", "bench", "sweep"),
    *_FINISHED,
    *_LISTING,
    *_DATA,
)
COMMANDS = ("new", *_CONFIGURED, "memory-model-score", "gpu-selftest", "mask-score", "run-notebook", "generate")
"""Every command of `sft-play`."""
_BENCHMARKS = (
    *("benchmark", "benchmark-engines", "benchmark-logging", "benchmark-threads", "benchmark-starter", "starter-base"),
    *("bench-data", "benchmark-speed", "mutation-score", "registry"),
)
_ANSWERING = (
    *("plan", "memory-model-score", "verify-layouts", "doctor", "gpu-info", "gpu-selftest", "memory-check"),
    *("mask-score", "bench", "launch-file", *_DATA),
)
_LAUNCHED = (*LAUNCHING, "resume", "doctor")
_WATCHED = ("train-tb", "train-and-watch", "train-distributed-tb", "train-deepspeed-tb", "tensorboard", "tb-open")
MAINTAINING = ("lock", "generate", *_BENCHMARKS)
"""Targets of benchmarks/Makefile."""
COMMANDS_OF_MAKE = (
    *("help", "setup", "setup-unsloth", "lock", "test", "coverage", "fuzz", "lint", "format", "clean"),
    *_BENCHMARKS,
)
"""Targets that are not commands of `sft-play`."""
_ANYWHERE = ("*",)


class Variable(NamedTuple):
    """A variable of make, and the flag of the program that means the same.

    `commands`: those that take it. `help` and `example`: its line of `make help`, and the help of its flag.
    `kind`: how `Request` reads it: "text", "path", "names" (with commas), "count" (from 1) and "number" (from 0) may
    not be empty; "list" may; "switch" is off where it is empty or 0; "launch" is read by `launch/launch_options.py`.
    `of`: what a count or a number counts, for error messages.
    `ranks`: commands that take the flag, although make's target of that name does not pass the variable.
    """

    commands: Tuple[str, ...]
    help: str
    example: str
    kind: str = "text"
    has_flag: bool = True
    ranks: Tuple[str, ...] = ()
    of: str = ""


_TO_RANKS = ("train", "rank")
"""Commands that run as a rank, with the layout that the parent, or a person with torchrun, gave."""
VARIABLES: Dict[str, Variable] = {
    "CONFIG": Variable(_CONFIGURED, "the run YAML", "FILE", "path", ranks=("rank",)),
    "SET": Variable(
        _CONFIGURED,
        "settings that replace those of CONFIG",
        "'a.b=1 c.d=[x, y]'",
        "list",
        has_flag=False,
        ranks=("rank",),
    ),
    "HARDWARE": Variable(
        ("plan", "gpu-info", "check", "full-pipeline", "launch-file", "new"),
        "plan for this machine instead of the present one",
        "2xH200",
    ),
    "RUN": Variable(
        ("resume", "consolidate", "memory-check", *_BOARDS, *_FINISHED),
        "name or folder of a run (resume, consolidate and whatever works on runs); last: the newest finished one",
        "NAME",
    ),
    "JSON": Variable(COMMANDS, "print one JSON object on standard output, and nothing else there", "1", "switch"),
    "MODEL": Variable(("new",), "the model of the run YAML: hub id or local folder", "owner/name"),
    "FROM": Variable(("new",), "a file of axolotl, LLaMA-Factory, TRL or Unsloth, in our terms", "their.yaml", "path"),
    "OUT": Variable(
        (*_ANSWERING, "consolidate", "sweep", *_FINISHED, *_LISTING, *_BENCHMARKS, "fuzz", "new"),
        "write the answer to this file too (new: the run YAML)",
        "FILE",
        "path",
    ),
    "FOR": Variable(("launch-file",), "what schedules the job: slurm, skypilot, kubeflow", "slurm"),
    "WHY": Variable(
        ("plan", "check", *TRAINING),
        "plan, check, train: show everything, such as why and what else was compared (train.log always has it)",
        "1",
        "switch",
    ),
    "TRACE": Variable(("plan",), "confirm the choice by tracing the step (no GPU needed)", "1", "switch"),
    "WHATIF": Variable(("plan",), "the plan of every combination", "'a.b=1,2 c=x,y'"),
    "MAX": Variable(("plan",), "the largest that fits (seq_len, batch or model)", "seq_len"),
    "PRICE": Variable(("plan", "gpu-info"), "money per GPU-hour", "2.5", "number", of="the money of a GPU-hour"),
    "BUDGET": Variable(
        ("plan",),
        "money for the run in USD: finds the cheapest and the fastest machine within it, by a dated price list",
        "20",
        "number",
        of="an amount of money",
    ),
    "PEAKS": Variable(("memory-model-score", "benchmark-speed"), "CSV of measured peaks", "FILE", "path"),
    "LAYOUTS": Variable(("verify-layouts",), "the layouts to compare", "ddp,fsdp", "names"),
    "MODES": Variable(("verify-layouts",), "full, lora, qlora", "lora", "names"),
    "STEPS": Variable(("verify-layouts", "bench"), "optimizer steps of each run", "4", "count", of="optimizer steps"),
    "WARMUP": Variable(("bench",), "steps before those that are measured", "3", "count", of="optimizer steps"),
    "ROUNDS": Variable(("bench",), "how often each side runs, in turns", "3", "count", of="rounds"),
    "PEER": Variable(
        ("bench",), "what to compare with: bare, trl, trl-grouped, trl-cli, unsloth, axolotl, llamafactory", "trl"
    ),
    "PEER_PYTHON": Variable(("bench",), "the Python that has the peer's package", "PATH", "path"),
    "MINUTES": Variable(
        ("gpu-selftest",),
        "begin no part after so many; another start with the same OUT continues",
        "3",
        "number",
        of="a number of minutes",
    ),
    "FULL": Variable(("gpu-info",), "start torch too and ask it what it sees", "1", "switch"),
    "WATCH": Variable(("memory-check",), "refresh until Ctrl-C", "1", "switch"),
    "RUNS": Variable(("compare", "prune"), "names of the runs to compare or to remove", "'first second'", "names"),
    "CHECKPOINTS": Variable(("prune",), "remove only the checkpoints of finished runs", "1", "switch"),
    "TRUST": Variable(
        ("resume", "consolidate"),
        "read what DeepSpeed stored in a checkpoint even if it could run code (only from people you trust)",
        "1",
        "switch",
    ),
    "YES": Variable(("tb-clean", "prune", "push"), "remove or upload without asking", "1", "switch"),
    "FORCE": Variable(
        (
            *("process", "style", "dapt-docx", "render", "preview", "full-pipeline", "setup-accelerate", "merge"),
            *("export", "reproduce", "launch-file"),
        ),
        "overwrite files that exist or were edited by hand (commands on data, setup-accelerate, merge, export); "
        "reproduce: train with the present code if the run's own cannot be found",
        "1",
        "switch",
    ),
    "STYLE": Variable(("style", "full-pipeline"), "the system prompt", "'You are terse.'"),
    "N": Variable(("preview", "fuzz"), "how many examples; fuzz: cases of each part", "5", "count", of="examples"),
    "ROW": Variable(("preview",), "this row of the training file", "12", "count", of="a row, counted from 1"),
    "TEMPLATES": Variable(("mask-score",), "folder of chat templates", "FOLDER", "path"),
    "TOKENIZER": Variable(("mask-score", "bench-data"), "folder or hub id of a tokenizer", "FOLDER"),
    "NOTEBOOK": Variable(
        ("run-notebook",), "the notebook (.ipynb) to run on several ranks, from its own folder", "FILE", "path"
    ),
    "INPUT": Variable(("infer",), "prompts: one per line (.txt), or rows as training reads them", "FILE", "path"),
    "OUTPUT": Variable(("infer",), "where the answers go, as JSONL", "FILE", "path", has_flag=False),
    "MAX_NEW_TOKENS": Variable(("chat", "infer", "eval"), "longest answer", "512", "count", of="tokens"),
    "TEMPERATURE": Variable(
        ("chat",), "temperature of sampling; 0 always takes the likeliest token", "0.7", "number", of="a temperature"
    ),
    "SYSTEM": Variable(("chat",), "the system prompt", "'You are terse.'"),
    "ENGINE": Variable(("serve",), "what serves: transformers (default), or vllm where it is installed", "vllm"),
    "HOST": Variable(("serve",), "the address to listen on; others than 127.0.0.1 are open to the network", "0.0.0.0"),
    "PORT": Variable(("serve",), "the port; 0 takes any free one", "8000"),
    "DTYPE": Variable(("merge",), "dtype of the merged weights: bf16, fp16, fp32", "bf16"),
    "BASE": Variable(("merge",), "for a QLoRA run, the weights to merge into: dequantized, original", "original"),
    "LIMIT": Variable(
        ("eval", "export-test", "merge-test", "ship"), "how many rows, evenly spaced", "16", "count", of="rows"
    ),
    "SPLIT": Variable(("eval",), "which held-out rows: val, test", "val"),
    "DATA": Variable(
        ("eval", "new"), "rows in any format that training reads (new: to train on; eval: to evaluate on)", "FILE"
    ),
    "METRICS": Variable(
        ("eval",), "metrics of answers: exact_match, rouge_l, chrf, your module:function, or none", "rouge_l", "names"
    ),
    "TASKS": Variable(("eval",), "tasks of lm-evaluation-harness, in addition", "gsm8k,mmlu", "names"),
    "TOLERANCE": Variable(
        ("ship",),
        "nats per token by which the loss on general text and chats may rise",
        "0.3",
        "number",
        of="nats a token",
    ),
    "REPLAY": Variable(("ship",), "compute the verdict of this ship.json again, without the model", "FILE", "path"),
    "SERVE": Variable(
        ("check",), "engines that are to load the result: vllm, sglang, llama.cpp", "vllm,sglang", "names"
    ),
    "FORMAT": Variable(("export",), "what to export for: gguf, ollama, vllm", "gguf"),
    "QUANT": Variable(
        ("export",), "how a GGUF stores weights: f32, f16, bf16, q8_0, q4_k_m and its kin (default: losslessly)", "q8_0"
    ),
    "LLAMA_CPP": Variable(
        ("export", "export-test"), "a checkout of llama.cpp, in place of the downloaded converter", "FOLDER", "path"
    ),
    "REPO": Variable(("push",), "the repository on the Hugging Face hub", "user/name"),
    "MERGED": Variable(("push",), "upload the merged model in place of the adapter", "1", "switch"),
    "PUBLIC": Variable(("push",), "make the repository public; a new one is private without it", "1", "switch"),
    "STRATEGY": Variable(
        (*_LAUNCHED, "plan", "launch-file"),
        "layout over several ranks: ddp, fsdp, zero1, zero2, zero3, zero2_offload, zero3_offload, …",
        "zero2",
        "launch",
        ranks=_TO_RANKS,
    ),
    "NPROC": Variable((*_LAUNCHED, "setup-accelerate", "run-notebook"), "processes on this node", "2", "launch"),
    "GPUS": Variable((*_LAUNCHED, "setup-accelerate", "run-notebook"), "the GPUs to use", "0,1", "launch"),
    "NNODES": Variable(_LAUNCHED, "several nodes, the command once on each (with the next three)", "2", "launch"),
    "NODE_RANK": Variable(_LAUNCHED, "which of them this one is, from 0", "0", "launch", has_flag=False),
    "MASTER_ADDR": Variable(_LAUNCHED, "the address of node 0", "HOST", "launch", has_flag=False),
    "MASTER_PORT": Variable(_LAUNCHED, "a free port there", "29500", "launch", has_flag=False),
    "MAX_RESTARTS": Variable(
        ("train", "train-distributed", "train-deepspeed", "resume"),
        "start again so often from the last checkpoint where a process of the run dies (default: 0)",
        "3",
        "launch",
    ),
    "DEEPSPEED_CONFIG": Variable(
        (*_LAUNCHED, "plan", "launch-file"), "your DeepSpeed file (JSON or YAML)", "FILE", "launch", ranks=_TO_RANKS
    ),
    "ACCELERATE_CONFIG": Variable(
        (*_LAUNCHED, "setup-accelerate"), "your accelerate configuration", "FILE", has_flag=False
    ),
    "NUM_MACHINES": Variable(("setup-accelerate",), "how many machines", "2", has_flag=False),
    "MACHINE_RANK": Variable(("setup-accelerate",), "which of them this one is, from 0", "0", has_flag=False),
    "MAIN_IP": Variable(("setup-accelerate",), "the address of machine 0", "HOST", has_flag=False),
    "MAIN_PORT": Variable(("setup-accelerate",), "a free port there", "29500", has_flag=False),
    "INTERACTIVE": Variable(("setup-accelerate",), "answer accelerate's own questions", "1", "switch", has_flag=False),
    "TB_PORT": Variable(_WATCHED, "TensorBoard's port", "6006", has_flag=False),
    "TB_HOST": Variable(_WATCHED, "TensorBoard's address", "127.0.0.1", has_flag=False),
    "TB_KEEP": Variable(_WATCHED, "keep TensorBoard running after the run", "1", "switch", has_flag=False),
    "SMALL": Variable(("benchmark", "benchmark-engines"), "small runs, on a CPU too", "1", "switch", has_flag=False),
    "ROWS": Variable(("bench-data",), "how many rows", "10000,1000000", has_flag=False),
    "TRL_ROWS": Variable(("bench-data",), "how many of them TRL prepares", "10000", has_flag=False),
    "MUTANTS": Variable(("mutation-score",), "how many changes", "200", has_flag=False),
    "SEED": Variable(("mutation-score", "fuzz"), "which sample, or which cases", "0", has_flag=False),
    "PART": Variable(("fuzz",), "these parts: yaml, rows, words, make, serve, templates", "yaml,rows", has_flag=False),
    "CASE": Variable(("fuzz",), "this case of PART alone, to repeat what was found", "17", has_flag=False),
    "ALL": Variable(("help",), "every target and variable", "1", "switch", has_flag=False),
    "TESTS": Variable(("test", "coverage"), "arguments for pytest", "'ARGUMENTS'", "list", has_flag=False),
    "TORCH": Variable(
        ("lock", "setup", "setup-unsloth"),
        "the build of torch (cpu, cu126, cu130, rocm7.2, index, auto); for lock its version, X.Y.Z",
        "BUILD",
        has_flag=False,
    ),
    "PYTHON": Variable(_ANYWHERE, "the Python (3.11 to 3.14) that .venv is built with", "PATH", has_flag=False),
    "VENV": Variable(_ANYWHERE, "use this environment of yours; it is never built or changed", "PATH", has_flag=False),
    "UNSLOTH_VENV": Variable(
        _ANYWHERE, "the environment that has Unsloth, if it is not .venv-unsloth", "PATH", has_flag=False
    ),
}
"""Every variable of make that the toolkit reads."""
FLAGS: Dict[str, Tuple[str, ...]] = {
    "--deepspeed": (*TRAINING, "doctor", "rank"),
    "--tensorboard": (*TRAINING, "rank"),
    "--local_rank": (*TRAINING, "rank"),
}
"""Flags that are not variables, and the commands that take them."""

OTHER_WORDS = {
    "RANK": "NODE_RANK",
    "WORLDSIZE": "NNODES",
    "NUMNODES": "NNODES",
    "NPROCPERNODE": "NPROC",
    "NUMPROCESSES": "NPROC",
    "NUMGPUS": "NPROC",
    "NGPUS": "NPROC",
    "GPUIDS": "GPUS",
    "DEVICES": "GPUS",
    "LAYOUT": "STRATEGY",
    **dict.fromkeys(("GPU", "CARD", "MACHINE", "GPUTYPE", "GPUNAME"), "HARDWARE"),
}
"""Other names for the same, in capitals without underscores: launchers' and people's."""
DATA_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
"""Endings of names that are no run YAML's."""

OF_OTHERS = (
    *("ACCELERATE_", "AMD_", "AWS_", "BITSANDBYTES_", "BLIS_", "BNB_", "CLEARML_", "COMET_", "CONDA_", "CUBLAS_"),
    *("CUDA_", "CUDNN_", "CURL_", "DS_", "FI_", "FLASH_", "GCC_", "GIT_", "GLOO_", "GOMP_", "GOOGLE_", "GPU_"),
    *("GRPC_", "HF_", "HIP_", "HSA_", "HUGGINGFACE_", "KMP_", "LC_", "LD_", "MAKE", "MALLOC_", "MKL_", "MLFLOW_"),
    *("MPI_", "NCCL_", "NEPTUNE_", "NUMEXPR_", "NVIDIA_", "NVTE_", "OMPI_", "OMP_", "OPENBLAS_", "PIP_", "PYTHON"),
    *("PYTORCH_", "RAYON_", "RCCL_", "ROCM_", "ROCR_", "SAFETENSORS_", "SFT_PLAY_", "SLURM_", "SSL_", "TF_"),
    *("TIKTOKEN_", "TOKENIZERS_", "TORCH", "TQDM_", "TRANSFORMERS_", "TRITON_", "TRL_", "UCX_", "UNSLOTH_", "UV_"),
    *("VECLIB_", "WANDB_", "XDG_", "XLA_"),
)
"""Prefixes of other programs' and libraries' variables: `make train HF_TOKEN=…` passes them on."""
_OTHERS = (
    *("ALL_PROXY", "BROWSER", "CC", "CFLAGS", "CI", "COLUMNS", "CPATH", "CXX", "CXXFLAGS", "DISPLAY", "FORCE_COLOR"),
    *("GNUMAKEFLAGS", "HOME", "HTTPS_PROXY", "HTTP_PROXY", "LANG", "LANGUAGE", "LDFLAGS", "LIBRARY_PATH", "LINES"),
    *("LOGNAME", "MAX_JOBS", "MFLAGS", "NO_COLOR", "NO_PROXY", "PATH", "REQUESTS_CA_BUNDLE", "SHELL", "TEMP", "TERM"),
    *("TMP", "TMPDIR", "TZ", "USER", "V", "VERBOSE", "VIRTUAL_ENV"),
)


def command_of(target: str) -> str:
    """The command of `sft-play` that a target of make runs."""
    return TARGETS.get(target, target)


def targets() -> Set[str]:
    """Every target of make that the table speaks of."""
    return {*COMMANDS, *TARGETS, *COMMANDS_OF_MAKE}


def is_taken(name: str, target: str) -> bool:
    """Whether a target of make uses a variable."""
    commands = VARIABLES[name].commands
    return commands == _ANYWHERE or target in commands or command_of(target) in commands


def flag_commands(name: str) -> Tuple[str, ...]:
    """The commands of the program that take the flag of a variable."""
    variable = VARIABLES[name]
    return tuple(one for one in (*variable.commands, *variable.ranks) if one not in (*TARGETS, *COMMANDS_OF_MAKE))


_FEW = 4


def help_lines(*, maintaining: bool) -> List[str]:
    """What `make help` shows of each variable: an example, the targets that take it where they are few, its meaning.

    Those that only targets of benchmarks/Makefile take are listed there (`maintaining`), all others in the Makefile.
    """
    lines = []
    for name, variable in VARIABLES.items():
        if set(variable.commands).issubset(MAINTAINING) is not maintaining:
            continue
        few = variable.commands != _ANYWHERE and len(variable.commands) <= _FEW
        takers = f"{', '.join(variable.commands)}: " if few else ""
        lines.append(f"{name + '=' + variable.example:<24} {takers}{variable.help}")
    return lines


def about(makefile: str, target: str) -> List[str]:
    """What `make help TARGET` shows: the target's line of a Makefile, and the variables that it takes."""
    text = next(line for line in makefile.splitlines() if line.startswith(target + ":")).partition("## ")[2]
    taken = [(name, one) for name, one in VARIABLES.items() if is_taken(name, target)]
    return [f"make {target}: {text}", *(f"  {name + '=' + one.example:<24} {one.help}" for name, one in taken)]


def refusal(
    goals: Sequence[str], given: Iterable[str], empty: Iterable[str], here: Optional[Sequence[str]] = None
) -> Optional[str]:
    """What is wrong with make's command line, in one line; None where nothing is.

    Args:
        goals: the targets that were asked for.
        given: the names of all variables on the command line, of which `empty` have no value.
        here: the targets of the Makefile that asks; None is every target of both.
    """
    asked = list(goals or ["help"])
    unknown = [_no_target(goal) for goal in asked if goal not in (here or targets())]
    if unknown:
        return "; ".join(unknown)
    words = f"make {' '.join(asked)}" if goals else "make without a target"
    wrong = [text for name in sorted(given) for text in [_wrong(name, asked, words)] if text]
    for name in sorted(empty):
        if (
            name in VARIABLES
            and VARIABLES[name].kind not in ("list", "switch")
            and any(is_taken(name, goal) for goal in asked)
        ):
            wrong.append(f"{name}= is given and empty (an unset shell variable?): give a value, or leave it out")
    return "; ".join(wrong) or None


def spoken(target: str) -> str:
    """How a target is called, from the checkout."""
    return f"make -C benchmarks {target}" if target in MAINTAINING else f"make {target}"


def _no_target(goal: str) -> str:
    if goal in targets():  # of the other Makefile
        return f"make {goal}: that target is called as {spoken(goal)}"
    near = nearest(goal, targets())
    hint = f"did you mean {spoken(near)}?" if near else "make help ALL=1 lists them"
    if goal.endswith((".yaml", ".yml")):
        hint = f"a run YAML is given as CONFIG={goal}"
    elif goal.lower().endswith(DATA_SUFFIXES):
        hint = f"data are named by a run YAML: make new MODEL=owner/name DATA={goal} writes one"
    return f"make {goal}: there is no such target; {hint}"


def _wrong(name: str, asked: List[str], words: str) -> Optional[str]:
    """What is wrong with one variable, whatever its value."""
    if name in VARIABLES:
        if any(is_taken(name, goal) for goal in asked):
            return None
        refused = f"{name}= is not used by {words}; it belongs to {_takers(name)}"
        is_run = any(command_of(goal) in (*TRAINING, *DESCRIBING) for goal in asked)
        return f"{refused} (the setting: SET='{SETTINGS[name]}=...')" if is_run and name in SETTINGS else refused
    if name.upper() in _OTHERS:
        return None
    own = [one for one in VARIABLES if any(is_taken(one, goal) for goal in asked)]
    # PYTHONPATH is no slip of PYTHON, and ACCELERATE_CONFG is one of ACCELERATE_CONFIG
    alike = 0.85 if name.startswith(OF_OTHERS) else None
    near = OTHER_WORDS.get(plain(name))
    if near not in own:  # GPU=4090 is HARDWARE= for make plan, and a slip of GPUS= where ranks are launched
        near = nearest(name, own, alike=alike) or near or nearest(name, list(VARIABLES), alike=alike)
    if near is not None:
        whose = "" if near in own else f" It belongs to {_takers(near)}"
        return f"{name}= is not a variable of {words}; did you mean {near}=?{whose}"
    if name.startswith(OF_OTHERS):
        return None
    return (
        f"{name}= is not a variable of {words}, which takes {', '.join(own)} (a setting of the run YAML goes into "
        f"SET='a.b=1'; a variable for another program goes before make: {name}=... make)"
    )


SETTINGS = {
    "BASE": "model.name",
    "DATA": "data.train_path",
    "MODEL": "model.name",
    "OUTPUT": "output.dir",
    "SEED": "train.seed",
    "STEPS": "train.max_steps",
}
"""Variables of some targets whose names stand for a setting where a run is trained or described."""


def _takers(name: str) -> str:
    """The targets that use a variable, the first of them by name."""
    named = [spoken(one) for one in VARIABLES[name].commands]
    return ", ".join(named) if len(named) <= 7 else f"{', '.join(named[:6])} and {len(named) - 6} others"
