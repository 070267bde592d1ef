"""What is started again in the same command: ranks that ran out of memory, with smaller micro-batches, and with
MAX_RESTARTS= a run of which a process died, from its last checkpoint."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from sft_play.config.load import LoadedConfig
from sft_play.errors import ConfigError, RunFolderError
from sft_play.launch.exported import Ranks
from sft_play.launch.launch_options import LaunchOptions
from sft_play.log import write_log_to
from sft_play.runs import ran_out
from sft_play.runs.folder import DIED, RESTARTS, RunFolder

logger = logging.getLogger(__name__)


@dataclass
class Restarts:
    """The restarts of one command: at most `most` after a process died."""

    most: int
    done: int = 0

    def wanted(self, folder: RunFolder, loaded: LoadedConfig) -> bool:
        """Whether a run that has failed is to be started again; why is logged, and recorded in its manifest."""
        if event := ran_out.take(folder):
            logger.warning("Starting again with micro-batch %d", event.now)
            return True
        died = take_death(folder) if self.most else None
        if died is None:
            return False
        with _logged(folder):
            if self.done == self.most:
                logger.error("MAX_RESTARTS=%d is used up: the run ends", self.most)
                return False
            self.done += 1
            step, where = _goes_on(folder, loaded)
            logger.warning("Restart %d of %d: %s; the run goes on from %s", self.done, self.most, died, where)
        entry = {"after": died, "from_step": step, "number": self.done, "of": self.most}
        folder.update_manifest(**{RESTARTS: [*folder.manifest().get(RESTARTS, []), entry]})
        return True


def take_death(folder: RunFolder) -> str | None:
    """How a process of a run died, which the manifest says no more afterwards; None where none did."""
    with contextlib.suppress(RunFolderError):  # an unused folder was removed again
        died = folder.manifest().get(DIED)
        if isinstance(died, str):
            folder.update_manifest(**{DIED: None})
            return died
    return None


def _goes_on(folder: RunFolder, loaded: LoadedConfig) -> tuple[int, str]:
    """The step from which a run goes on that is resumed, and in words."""
    from sft_play.training.checkpoints.checkpoints import last_complete, step_of

    begun = [stage for one in loaded.config.curriculum if (stage := folder.of_stage(one.name)).has_begun]
    part = begun[-1] if begun else folder
    last, of = last_complete(part.checkpoints), f" of stage {part.stage}" if part.stage else ""
    if last is None:
        return 0, f"the beginning{of}: there is no checkpoint"
    return step_of(last), f"the checkpoint of step {step_of(last)}{of}"


@contextlib.contextmanager
def _logged(folder: RunFolder) -> Iterator[None]:
    """While open, what is logged goes to the run's log too."""
    file = write_log_to(folder.log_path)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(file)
        file.close()


def refuse_restarts(loaded: LoadedConfig, options: LaunchOptions, ranks: Ranks | None) -> None:
    """Raises ConfigError where MAX_RESTARTS= is given and this command could not start the run again."""
    if not options.restarts:
        return
    asked = f"MAX_RESTARTS={options.restarts}"
    if ranks is not None:
        raise ConfigError(
            f"{asked} is for processes that this command starts, and another launcher started this one: only that "
            "launcher can start it again (then output.if_exists=resume continues)"
        )
    if options.nodes.count > 1:
        raise ConfigError(
            f"{asked} starts the processes of one machine again, and this run is over {options.nodes.count}: let the "
            "scheduler start the job again on all of them (make launch-file writes one that resumes)"
        )
    if loaded.config.tuning.backend == "unsloth":
        raise ConfigError(f"{asked} does not watch the processes of tuning.backend=unsloth; leave it out")
