"""Which command takes which variable of make, and which flag: the one table that make, the program and the tests read.

Standard library only, and nothing newer than Python 3.6: `scripts/check_variables.py` reads it with any Python, before
there is an environment.
"""

from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

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
"""Commands that say something about the run which `train` with the same words would start."""
_DATA = ("process", "style", "dapt-docx", "render", "preview", "check", "full-pipeline")
_BOARDS = ("tensorboard", "tb-open", "tb-stop", "tb-clean")
_CONFIGURED = (
    *TRAINING,
    *("setup-accelerate", "plan", "verify-layouts", *_BOARDS, "doctor", "consolidate", "gpu-info", "memory-check"),
    *_DATA,
)
_BENCHMARKS = (
    *("benchmark", "benchmark-engines", "benchmark-logging", "benchmark-threads", "benchmark-starter"),
    *("bench-data", "benchmark-speed", "mutation-score"),
)
_ANSWERING = (
    *(
        "plan",
        "memory-model-score",
        "verify-layouts",
        "doctor",
        "gpu-info",
        "gpu-selftest",
        "memory-check",
        "mask-score",
    ),
    *_DATA,
)
_WATCHED = ("train-tb", "train-and-watch", "train-distributed-tb", "train-deepspeed-tb", "tensorboard", "tb-open")
COMMANDS_OF_MAKE = ("help", "setup", "setup-unsloth", "lock", "test", "lint", "format", "clean", *_BENCHMARKS)
"""Targets that are no commands of `sft-play`."""
_ANYWHERE = ("*",)


class Variable(NamedTuple):
    """A variable of make, and the flag of the program that means the same.

    `kind`: "text", which may not be empty; "list", of which there may be none; "switch", off where it is empty or 0.
    `ranks`: the commands that take the flag though make's target of that name does not pass the variable.
    """

    commands: Tuple[str, ...]
    help: str = ""
    kind: str = "text"
    has_flag: bool = True
    ranks: Tuple[str, ...] = ()


_TO_RANKS = ("train",)  # a rank runs `train` with the layout that its parent, or a person with torchrun, gave it
VARIABLES: Dict[str, Variable] = {
    "CONFIG": Variable(_CONFIGURED, "run YAML"),
    "SET": Variable(_CONFIGURED, "settings that replace those of CONFIG", kind="list", has_flag=False),
    "HARDWARE": Variable(("plan", "gpu-info", "check", "full-pipeline"), "plan for a named machine, such as 2xH200"),
    "RUN": Variable(("resume", "consolidate", "memory-check", *_BOARDS), "name of a run, or its folder"),
    "JSON": Variable(_ANSWERING, "print one JSON object and nothing else", kind="switch"),
    "OUT": Variable((*_ANSWERING, "consolidate", *_BENCHMARKS), "write the answer to this file too"),
    "TRACE": Variable(("plan",), "confirm the choice by a trace", kind="switch"),
    "WHATIF": Variable(("plan",), "a grid, such as model.max_seq_len=2048,4096"),
    "MAX": Variable(("plan",), "find the largest seq_len, batch or model that fits"),
    "PRICE": Variable(("plan", "gpu-info"), "money per GPU-hour"),
    "PEAKS": Variable(("memory-model-score", "benchmark-speed"), "CSV of measured peaks"),
    "LAYOUTS": Variable(("verify-layouts",), "those to compare, such as ddp,fsdp"),
    "MODES": Variable(("verify-layouts",), "full, lora, qlora"),
    "STEPS": Variable(("verify-layouts",), "optimizer steps of each run"),
    "FULL": Variable(("gpu-info",), "ask torch what it sees", kind="switch"),
    "WATCH": Variable(("memory-check",), "renew until Ctrl-C", kind="switch"),
    "YES": Variable(("tb-clean",), "remove without asking", kind="switch"),
    "FORCE": Variable(
        ("process", "style", "dapt-docx", "render", "preview", "full-pipeline", "setup-accelerate"),
        "write over files that were edited by hand",
        kind="switch",
    ),
    "STYLE": Variable(("style", "full-pipeline"), "the system prompt"),
    "N": Variable(("preview",), "how many examples"),
    "ROW": Variable(("preview",), "this row, counted from 1"),
    "TEMPLATES": Variable(("mask-score",), "folder of chat templates"),
    "TOKENIZER": Variable(("mask-score", "bench-data"), "folder or hub id of a tokenizer"),
    "NOTEBOOK": Variable(("run-notebook",), "the notebook (.ipynb) to run over ranks"),
    "STRATEGY": Variable(
        (*LAUNCHING, "resume", "doctor", "plan"), "layout over several ranks: ddp, fsdp, zero2, …", ranks=_TO_RANKS
    ),
    "NPROC": Variable((*LAUNCHING, "resume", "doctor", "setup-accelerate", "run-notebook"), "processes on this node"),
    "GPUS": Variable((*LAUNCHING, "resume", "doctor", "setup-accelerate", "run-notebook"), "GPUs to use, such as 0,1"),
    "NNODES": Variable((*LAUNCHING, "resume", "doctor"), "machines (with NODE_RANK, MASTER_ADDR, MASTER_PORT)"),
    "NODE_RANK": Variable((*LAUNCHING, "resume", "doctor"), has_flag=False),
    "MASTER_ADDR": Variable((*LAUNCHING, "resume", "doctor"), has_flag=False),
    "MASTER_PORT": Variable((*LAUNCHING, "resume", "doctor"), has_flag=False),
    "DEEPSPEED_CONFIG": Variable((*LAUNCHING, "resume", "doctor"), "DeepSpeed's file", ranks=_TO_RANKS),
    "ACCELERATE_CONFIG": Variable((*LAUNCHING, "resume", "doctor", "setup-accelerate"), has_flag=False),
    "NUM_MACHINES": Variable(("setup-accelerate",), has_flag=False),
    "MACHINE_RANK": Variable(("setup-accelerate",), has_flag=False),
    "MAIN_IP": Variable(("setup-accelerate",), has_flag=False),
    "MAIN_PORT": Variable(("setup-accelerate",), has_flag=False),
    "INTERACTIVE": Variable(("setup-accelerate",), kind="switch", has_flag=False),
    "TB_PORT": Variable(_WATCHED, has_flag=False),
    "TB_HOST": Variable(_WATCHED, has_flag=False),
    "TB_KEEP": Variable(_WATCHED, kind="switch", has_flag=False),
    "SMALL": Variable(("benchmark", "benchmark-engines"), kind="switch", has_flag=False),
    "ROWS": Variable(("bench-data",), has_flag=False),
    "TRL_ROWS": Variable(("bench-data",), has_flag=False),
    "MUTANTS": Variable(("mutation-score",), has_flag=False),
    "SEED": Variable(("mutation-score",), has_flag=False),
    "TESTS": Variable(("test",), kind="list", has_flag=False),
    "TORCH": Variable(("lock", "setup", "setup-unsloth"), has_flag=False),
    "PYTHON": Variable(_ANYWHERE, has_flag=False),
    "VENV": Variable(_ANYWHERE, has_flag=False),
    "UNSLOTH_VENV": Variable(_ANYWHERE, has_flag=False),
}
"""Every variable of make that the toolkit reads."""
FLAGS: Dict[str, Tuple[str, ...]] = {
    "--deepspeed": (*TRAINING, "doctor"),
    "--tensorboard": TRAINING,
    "--local_rank": TRAINING,
}
"""Flags that are no variables, and the commands that take them."""

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
}
"""What launchers call the same things, in capitals without underscores."""

OF_OTHERS = (
    *(
        "ACCELERATE_",
        "AMD_",
        "AWS_",
        "BITSANDBYTES_",
        "BLIS_",
        "BNB_",
        "CLEARML_",
        "COMET_",
        "CONDA_",
        "CUBLAS_",
        "CUDA_",
    ),
    *("CUDNN_", "CURL_", "DS_", "FI_", "FLASH_", "GCC_", "GIT_", "GLOO_", "GOMP_", "GOOGLE_", "GPU_", "GRPC_", "HF_"),
    *("HIP_", "HSA_", "HUGGINGFACE_", "KMP_", "LC_", "LD_", "MAKE", "MALLOC_", "MKL_", "MLFLOW_", "MPI_", "NCCL_"),
    *("NEPTUNE_", "NUMEXPR_", "NVIDIA_", "NVTE_", "OMPI_", "OMP_", "OPENBLAS_", "PIP_", "PYTHON", "PYTORCH_", "RAYON_"),
    *("RCCL_", "ROCM_", "ROCR_", "SAFETENSORS_", "SFT_PLAY_", "SLURM_", "SSL_", "TF_", "TIKTOKEN_", "TOKENIZERS_"),
    *(
        "TORCH",
        "TQDM_",
        "TRANSFORMERS_",
        "TRITON_",
        "TRL_",
        "UCX_",
        "UNSLOTH_",
        "UV_",
        "VECLIB_",
        "WANDB_",
        "XDG_",
        "XLA_",
    ),
)
"""How the names of other programs' and libraries' variables begin: `make train HF_TOKEN=…` hands them on."""
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
    named = {command for variable in VARIABLES.values() for command in variable.commands} - set(_ANYWHERE)
    return {*named, *TARGETS, *COMMANDS_OF_MAKE, "generate"}


def is_taken(name: str, target: str) -> bool:
    """Whether a target of make uses a variable."""
    commands = VARIABLES[name].commands
    return commands == _ANYWHERE or target in commands or command_of(target) in commands


def flag_commands(name: str) -> Tuple[str, ...]:
    """The commands of the program that take the flag of a variable."""
    variable = VARIABLES[name]
    return tuple(one for one in (*variable.commands, *variable.ranks) if one not in (*TARGETS, *COMMANDS_OF_MAKE))


def refusal(goals: Sequence[str], given: Iterable[str], empty: Iterable[str]) -> Optional[str]:
    """What is wrong with the variables on make's command line, in one line; None where nothing is.

    Args:
        goals: the targets that were asked for; those that the table does not know are make's to refuse.
        given: the names of all variables on the command line, of which `empty` have no value.
    """
    asked = [goal for goal in (goals or ["help"]) if goal in targets()]
    if not asked:
        return None
    words = f"make {' '.join(asked)}" if goals else "make without a target"
    wrong = [text for name in sorted(given) for text in [_wrong(name, asked, words)] if text]
    for name in sorted(empty):
        if name in VARIABLES and VARIABLES[name].kind == "text" and any(is_taken(name, goal) for goal in asked):
            wrong.append(f"{name}= is given and empty (an unset shell variable?): give a value, or leave it out")
    return "; ".join(wrong) or None


def _wrong(name: str, asked: List[str], words: str) -> Optional[str]:
    """What is wrong with one variable, whatever its value."""
    if name in VARIABLES:
        if any(is_taken(name, goal) for goal in asked):
            return None
        return f"{name}= is not used by {words}; it belongs to {_takers(name)}"
    if name.upper() in _OTHERS:
        return None
    own = [one for one in VARIABLES if any(is_taken(one, goal) for goal in asked)]
    near = OTHER_WORDS.get(_plain(name)) or nearest(name, own, list(VARIABLES))
    if near is not None:
        whose = "" if near in own else f" It belongs to {_takers(near)}"
        return f"{name}= is no variable of {words}; did you mean {near}=?{whose}"
    if name.startswith(OF_OTHERS):
        return None
    return (
        f"{name}= is no variable of {words}, which takes {', '.join(own)} (a setting of the run YAML goes into "
        f"SET='a.b=1'; a variable for another program goes before make: {name}=... make)"
    )


def _takers(name: str) -> str:
    """The targets that use a variable, the first of them by name."""
    named = [f"make {one}" for one in VARIABLES[name].commands]
    return ", ".join(named) if len(named) <= 6 else f"{', '.join(named[:6])} and {len(named) - 6} others"


def nearest(name: str, *choices: Sequence[str]) -> Optional[str]:
    """The name that was probably meant: of the first list that has one at all; None where none is near.

    Case, hyphens and underscores do not count. Of short names one letter may differ, of longer ones two.
    """
    plain = _plain(name)
    for names in choices:
        ranked = sorted((_distance(plain, _plain(one)), one) for one in names)
        for distance, one in ranked[:1]:
            shortest = min(len(plain), len(_plain(one)))
            if distance <= (0 if shortest < 3 else 1 if shortest < 6 else 2):
                return one
    return None


def _plain(name: str) -> str:
    return name.upper().replace("_", "").replace("-", "")


def _distance(one: str, other: str) -> int:
    """How many letters differ: inserted, left out, changed, or two neighbours swapped (optimal string alignment)."""
    before: List[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        before, last, row = row, before, [i]
        for j, b in enumerate(other, start=1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                best = min(best, last[j - 2] + 1)
            row.append(best)
    return row[-1]
