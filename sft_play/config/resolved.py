"""A config as plain data with its defaults, as `resolved.json` holds it, and how two of them differ."""

from __future__ import annotations

from typing import Any

from sft_play.config.leaves import sections
from sft_play.config.schema import RunConfig


def resolved(config: RunConfig, *, effective_batch: int | None = None) -> dict[str, Any]:
    """The config as plain data, defaults included: what `resolved.json` holds.

    Args:
        effective_batch: the plan's. Where the config derives it from the ranks, the file has this number in place of
            the default, so that it trains the same over any number of ranks, or is refused.
    """
    data = config.model_dump(mode="json")
    if config.train.effective_follows:
        data["train"]["effective_batch_size"] = effective_batch
    return data


def resolved_without_paths(config: RunConfig) -> dict[str, Any]:
    """`resolved` without paths: nodes may keep the same files in different folders."""
    settings = resolved(config)
    kept = {key: value for key, value in settings.items() if key != "output"}
    kept["model"] = {key: value for key, value in kept["model"].items() if key not in ("name", "adapter")}
    kept["data"] = _data_without_paths(kept["data"])
    kept["curriculum"] = [{**stage, "data": _data_without_paths(stage["data"])} for stage in kept["curriculum"]]
    return kept


def _data_without_paths(data: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in data.items() if not key.endswith("_path")}
    sources = [
        {key: value for key, value in one.items() if not key.endswith("path")} for one in data.get("sources", ())
    ]
    return {**kept, "sources": sources}


def differing_keys(one: dict[str, Any], other: dict[str, Any], *, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Leaves that differ between two resolved configs: {path: (one's value, other's value)}."""
    differing: dict[str, tuple[Any, Any]] = {}
    for key in [*one, *(key for key in other if key not in one)]:
        left, right = one.get(key), other.get(key)
        path = f"{prefix}{key}"
        if isinstance(left, dict) and isinstance(right, dict) and path in sections():
            differing |= differing_keys(left, right, prefix=f"{path}.")
        elif left != right:
            differing[path] = (left, right)
    return differing
