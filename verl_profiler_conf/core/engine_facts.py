"""The sub-node `engine`: facts that the engines' own counters depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiler_conf.core.raw import RawSettings

AUTO = "auto"
"""The installed engine, or its installed version."""

_TEXTS = ("name", "version")
_COUNTS = {"prompt_tokens": 1, "max_num_batched_tokens": 1, "num_speculative_tokens": 0}
"""Facts that are numbers -> the smallest value of each."""

_FACTS = (*_TEXTS, *_COUNTS)


def read_engine_facts(raw: RawSettings) -> dict[str, Any]:
    """The facts that the settings hold. Those that are null are left out.

    Raises:
        ConfigError: one line with the full key, the value and what is allowed.
    """
    node = raw.values.get("engine")
    if node is None:
        node = {}
    if not isinstance(node, Mapping):
        raise raw.error("engine", node, f"must hold {', '.join(_FACTS)}")
    facts = RawSettings(node, f"{raw.prefix}engine.")
    facts.refuse_unknown(_FACTS)
    for key, least in _COUNTS.items():
        facts.optional_number(key, None, least=least)
    name, version = (facts.text(key) or AUTO for key in _TEXTS)
    if version != AUTO and name == AUTO:
        raise facts.error("version", version, f"needs the engine's name: set {facts.prefix}name too")
    return {key: node.get(key) for key in _FACTS if node.get(key) is not None}
