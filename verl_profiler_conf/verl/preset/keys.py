"""verl's own configuration keys: which ones a preset sets, to which values, and what contradicts a preset.

Pure: no OmegaConf, no verl. A launch comes in as `Facts`, and the values of verl's keys go out as plain values.

verl's keys come from its `rollout.yaml`, `actor.yaml` and `ppo_trainer.yaml`. What they do was read in its sources
(`utils/profiler/`, `workers/rollout/*/`). Its rollout has a profiler since 0.7.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.verl.preset.facts import GLOBAL_RANKS_SINCE, OLDEST, ROLLOUT_KEY, TOKENS_SINCE, Facts
from verl_profiler_conf.verl.preset.replacements import replacement

_ROLLOUT = f"{ROLLOUT_KEY}.profiler"
_ROLE_NODES = {
    "actor": "actor_rollout_ref.actor.profiler",
    "ref": "actor_rollout_ref.ref.profiler",
    "critic": "critic.profiler",
}

_CONTENTS = {
    "torch": ("cuda", "cpu", "memory", "shapes", "stack"),
    "npu": ("npu", "cpu", "memory", "shapes", "module", "stack"),
}
"""What verl's tools accept; anything else ends its job."""


@dataclass(frozen=True)
class Key:
    """One of verl's keys.

    Attributes:
        path: in verl's config.
        fields: fields of the preset that decide the value; empty where there is no choice.
        value: makes the value from the facts.
        default: verl's own value, for a preset that is not enabled.
        inherits: key from which verl takes the value by default; None: `default` alone counts.
        since: first verl that has the key.
        why: what would happen otherwise, where there is no choice.
        role: whose key it is.
        sets: whether the preset sets the key. False: verl derives it from a key that the preset sets, and the launch
            must not undo that.
    """

    path: str
    fields: tuple[str, ...]
    value: Callable[[Facts], Any]
    default: Any = None
    inherits: str | None = None
    since: Version = OLDEST
    why: str = ""
    role: str = "rollout"
    sets: bool = True

    def verl_default(self, read: Callable[[str], Any]) -> Any:
        """The value that verl itself gives the key.

        Args:
            read: path in verl's config -> value; None: not there.
        """
        inherited = read(self.inherits) if self.inherits else None
        return self.default if inherited is None else inherited


def _enabled(role: str) -> Callable[[Facts], bool]:
    return lambda facts: role in facts.roles


def _start(facts: Facts) -> int | None:
    counters = facts.counters
    return counters.get("delay_iterations") or counters.get("start_step") or None


def _end(facts: Facts) -> int | None:
    # verl hands the engine end - start, and nothing (vLLM: 0) for no end
    length = facts.counters.get("max_iterations") or facts.counters.get("num_steps")
    return (_start(facts) or 0) + length if length else None


def _contents(facts: Facts) -> list[str]:
    return [item for item in facts.settings.contents if item in _CONTENTS[facts.tool]]


def _rollout_ranks(facts: Facts) -> list[int]:
    if facts.version >= GLOBAL_RANKS_SINCE:
        return list(facts.settings.ranks)
    return sorted({rank // facts.replica_size for rank in facts.settings.ranks})


def key_table(tool: str, version: Version | None) -> dict[str, Key]:
    """The keys that a preset sets: name -> key. The name is what a config shows, in `${verl_profiler_conf.verl:name}`.

    Args:
        tool: `torch` or `npu`.
        version: of verl; None, unknown: the newest that is known.
    """
    actor_tool = f"{_ROLE_NODES['actor']}.tool_config.{tool}"
    rollout_tool = f"{_ROLLOUT}.tool_config.{tool}"
    table = {
        "tool": Key("global_profiler.tool", (), lambda facts: facts.tool, why="the option's name says which"),
        "steps": Key("global_profiler.steps", ("steps",), lambda facts: list(facts.steps)),
        "continuous": Key(
            "global_profiler.profile_continuous_steps",
            (),
            lambda _: False,
            default=False,
            why="with it verl starts the rollout's profiler on the first of adjacent steps only",
        ),
        "save_path": Key(
            "global_profiler.save_path",
            ("save_path",),
            lambda facts: facts.save_path or "outputs/profile",
            default="outputs/profile",
        ),
        "rollout.tool": Key(
            f"{_ROLLOUT}.tool",
            (),
            lambda facts: facts.tool,
            inherits="global_profiler.tool",
            why="the rollout reads the tool here",
            sets=False,
        ),
        "rollout.save_path": Key(
            f"{_ROLLOUT}.save_path",
            ("save_path",),
            lambda facts: facts.save_path or "outputs/profile",
            inherits="global_profiler.save_path",
            sets=False,
        ),
        "enable": Key(
            f"{_ROLLOUT}.enable",
            ("roles",),
            _enabled("rollout"),
            default=False,
            inherits=f"{_ROLE_NODES['actor']}.enable",
        ),
        "all_ranks": Key(
            f"{_ROLLOUT}.all_ranks",
            ("all_ranks",),
            lambda facts: facts.settings.all_ranks,
            default=False,
            inherits=f"{_ROLE_NODES['actor']}.all_ranks",
        ),
        "ranks": Key(
            f"{_ROLLOUT}.ranks", ("ranks",), _rollout_ranks, default=[], inherits=f"{_ROLE_NODES['actor']}.ranks"
        ),
        "discrete": Key(
            f"{rollout_tool}.discrete",
            (),
            lambda _: True,
            default=False,
            inherits=f"{actor_tool}.discrete",
            why="without it verl never starts the rollout's profiler",
        ),
        "contents": Key(
            f"{rollout_tool}.contents", ("contents",), _contents, default=[], inherits=f"{actor_tool}.contents"
        ),
        "profile_token_start": Key(
            f"{rollout_tool}.profile_token_start",
            ("profile_token_start", "profile_token_windows"),
            _start,
            since=TOKENS_SINCE,
        ),
        "profile_token_end": Key(
            f"{rollout_tool}.profile_token_end",
            ("profile_token_end", "profile_token_windows"),
            _end,
            since=TOKENS_SINCE,
        ),
    }
    if tool == "npu":
        table["level"] = Key(
            f"{rollout_tool}.level",
            ("level",),
            lambda facts: facts.settings.level,
            default="level0",
            inherits=f"{actor_tool}.level",
        )
        table["analysis"] = Key(
            f"{rollout_tool}.analysis",
            ("analysis",),
            lambda facts: facts.settings.analysis,
            default=False,
            inherits=f"{actor_tool}.analysis",
        )
    for role, node in _ROLE_NODES.items():
        table[f"{role}.enable"] = Key(f"{node}.enable", ("roles",), _enabled(role), default=False, role=role)
        table[f"{role}.all_ranks"] = Key(
            f"{node}.all_ranks", ("all_ranks",), lambda facts: facts.settings.all_ranks, default=False, role=role
        )
        table[f"{role}.ranks"] = Key(
            f"{node}.ranks", ("ranks",), lambda facts: list(facts.settings.ranks), default=[], role=role
        )
    return {name: key for name, key in table.items() if version is None or version >= key.since}


def contradiction(key: Key, facts: Facts, found: Any, prefix: str) -> ConfigError | None:
    """The error when verl's `key` holds another value than the preset's; None when the two agree.

    Args:
        found: value in the config, resolved and plain.
        prefix: of the preset's node.
    """
    wanted = key.value(facts)
    if isinstance(found, list) and isinstance(wanted, list):
        if sorted(map(repr, set(found))) == sorted(map(repr, set(wanted))):
            return None
    elif (found == wanted and type(found) is type(wanted)) or (found is None and not key.sets):
        return None
    if not key.fields and found is None:
        return ConfigError(
            key.path,
            found,
            f"is verl's default again: {prefix[:-1]} has to come after verl's own config, as +profiler does",
        )
    instead = replacement(key.role, key.fields, found, facts, prefix)
    if not key.fields:
        return ConfigError(key.path, found, f"contradicts {prefix[:-1]}, which needs {wanted!r} ({key.why}): {instead}")
    fields = " and ".join(prefix + name for name in key.fields)
    return ConfigError(key.path, found, f"contradicts {fields}, which makes it {wanted!r}: {instead}")
