"""Several runs over two CPU ranks in one start of Python, each with what its engine was told, read from live objects.

    python -m tests.many_runs RUNS.json FOUND.json

RUNS.json holds a list of command lines of `sft-play`. FOUND.json gets rank 0's facts of each, in the same order.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.processes import free_port

RANKS = 2


def told(trainer: Any) -> dict[str, Any]:
    """What an engine holds of the run's keys, in plain data."""
    wrapped = trainer.model_wrapped
    facts: dict[str, Any] = {"wrapped": type(wrapped).__name__}
    facts["buffers"] = sorted({str(one.dtype) for one in wrapped.buffers() if one.is_floating_point()})
    if hasattr(wrapped, "find_unused_parameters"):
        facts["find_unused_parameters"] = wrapped.find_unused_parameters
        logged = wrapped._get_ddp_logging_data()
        facts["comm_hook"] = logged.get("comm_hook", "")
    if hasattr(wrapped, "communication_data_type"):
        facts["communication_data_type"] = str(wrapped.communication_data_type)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.mixed_precision_policy is not None:
        policy = plugin.mixed_precision_policy
        facts["policy"] = [str(policy.param_dtype), str(policy.reduce_dtype)]
    return facts


def whole_gradients(trainer: Any) -> int:
    """Bytes of whole gradients that FSDP2 keeps on this rank."""
    from torch.distributed.fsdp import FSDPModule

    found = 0
    for module in trainer.model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for one in group.fsdp_params:
                kept = one.unsharded_accumulated_grad
                if kept is None:
                    kept = getattr(getattr(one, "_unsharded_param", None), "grad", None)
                found += 0 if kept is None else kept.numel() * kept.element_size()
    return found


def run(words: list[str], found: Path | None) -> int:
    """One run; its facts go into `found`."""
    from sft_play.cli import main as command
    from sft_play.training.loop.trainer import PlannedTrainer
    from sft_play.training.measure import summary

    facts: dict[str, Any] = {}
    check_engine, step = summary.check_engine, PlannedTrainer.training_step

    def proved(trainer: Any, plan: Any) -> Any:
        facts.update(told(trainer))
        return check_engine(trainer, plan)

    def stepped(self: Any, *args: Any, **options: Any) -> Any:
        loss = step(self, *args, **options)
        facts["whole_gradients"] = max(facts.get("whole_gradients", 0), whole_gradients(self))
        return loss

    summary.check_engine, PlannedTrainer.training_step = proved, stepped
    code = command(words)
    if found is not None:
        found.write_text(json.dumps(facts))
    return code


def rank_of(number: int, port: int, words: list[str], found: Path | None) -> int:
    """Start a rank in a process of its own, which has all imports already; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {
            "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        code = run(words, found)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def main(runs: Path, found: Path) -> int:
    """Run them all; the exit code is that of the first rank that fails, which ends the other one."""
    import sft_play.training.run

    print(f"{sft_play.training.run.__name__} and all that it needs is imported", flush=True)
    facts = []
    for words in json.loads(runs.read_text()):
        port = free_port()
        ranks = {rank_of(number, port, words, None if number else found) for number in range(RANKS)}
        while ranks:
            ended, status = os.wait()
            ranks.discard(ended)
            if code := os.waitstatus_to_exitcode(status):
                for left in ranks:
                    os.kill(left, signal.SIGKILL)
                return code
        facts.append(json.loads(found.read_text()))
    found.write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
