"""What every rank reads from its own disk and what must agree on all: data, model, settings, versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from sft_play.config.resolved import resolved_without_paths
from sft_play.facts.installed import COMPUTING
from sft_play.runs.manifest import versions
from sft_play.training.job import Job
from sft_play.training.prepare.prepare import OF_THE_MODEL


def digests(job: Job, facts: Mapping[str, Any], *, writes_date: bool) -> dict[str, str]:
    """The name and a short digest of each, as `distributed.require_alike` compares them.

    Args:
        facts: `data` of the manifest.
        writes_date: whether the chat template writes the day.
    """
    installed = versions()
    settings = resolved_without_paths(job.loaded.config)
    return {
        **{
            f"the {name}" if name in OF_THE_MODEL else f"the content of the {name} file": str(fact["sha256"])[:12]
            for name, fact in facts.items()
            if "sha256" in fact
        },
        **({"the day that the chat template writes": str(job.today)} if writes_date else {}),
        "the settings of the run": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12],
        **{f"the version of {name}": str(installed[name]) for name in ("sft_play", *COMPUTING)},
    }
