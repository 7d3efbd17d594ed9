"""verl's own configuration keys: which ones a preset sets, to what, and what contradicts it. Tables, per verl version.

Pure: no OmegaConf, no verl. A config enters as `Facts`; what verl is told comes out as plain values.

verl's keys come from its `rollout.yaml`, `actor.yaml` and `ppo_trainer.yaml`; what they do was read in its sources
(`utils/profiler/`, `workers/rollout/*/`). Its rollout has a profiler since 0.7.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import MAX_TOKEN

OLDEST = Version("0.7.1")
"""First verl whose rollout engines have a profiler of their own."""

TOKENS_SINCE = Version("0.9.0")
"""First verl whose tools take `profile_token_start`; an unknown key there ends its job."""

GLOBAL_RANKS_SINCE = Version("0.9.1")
"""From here on the rollout's `ranks` are global GPU ranks; before, they are indices of replicas."""

ROLES = ("rollout", "actor", "ref", "critic")
"""What can be profiled. The rollout gets the window; the others, verl's own profiler over whole stages."""

ENGINES = ("vllm", "sglang")
"""Rollout engines that start a profiler on request and can be windowed."""

ENGINE_KEY = "actor_rollout_ref.rollout.name"
ENV_KEY = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PROFILER_CONF"

_ROLLOUT = "actor_rollout_ref.rollout.profiler"
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
class Facts:
    """What the values depend on.

    Attributes:
        settings: the preset's, validated; `ranks` as the user gave them, global GPU ranks of the rollout.
        tool: verl's name of the profiler, `torch` or `npu`.
        version: of verl.
        steps: RL steps to profile, ascending; verl counts from 1.
        roles: out of `ROLES`.
        save_path: where captures go; None: not known yet, which is so before the job starts.
        replica_size: GPUs of one rollout replica (tensor x data x pipeline parallel).
        counters: the window in the counters of the rollout's engine; empty when they cannot hold it.
    """

    settings: Settings
    tool: str
    version: Version
    steps: tuple[int, ...]
    roles: tuple[str, ...]
    save_path: str | None
    replica_size: int
    counters: Mapping[str, int | None]


@dataclass(frozen=True)
class Key:
    """One of verl's keys.

    Attributes:
        path: in verl's config.
        fields: of the preset, that decide the value; empty where there is no choice.
        value: from the facts.
        default: verl's own, for a preset that is not enabled.
        inherits: key whose value is verl's default, where it has one (`default` if that is not there either).
        since: first verl that has it.
        why: what happens otherwise, where there is no choice.
        sets: False: verl derives it from a key that the preset sets, which must not be undone.
    """

    path: str
    fields: tuple[str, ...]
    value: Callable[[Facts], Any]
    default: Any = None
    inherits: str | None = None
    since: Version = OLDEST
    why: str = ""
    sets: bool = True


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
    inherited = f"{_ROLE_NODES['actor']}.tool_config.{tool}"
    mine = f"{_ROLLOUT}.tool_config.{tool}"
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
            f"{_ROLLOUT}.tool", (), lambda facts: facts.tool, why="the rollout reads the tool here", sets=False
        ),
        "rollout.save_path": Key(
            f"{_ROLLOUT}.save_path", ("save_path",), lambda facts: facts.save_path or "outputs/profile", sets=False
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
            f"{mine}.discrete",
            (),
            lambda _: True,
            default=False,
            inherits=f"{inherited}.discrete",
            why="without it verl never starts the rollout's profiler",
        ),
        "contents": Key(f"{mine}.contents", ("contents",), _contents, default=[], inherits=f"{inherited}.contents"),
        "profile_token_start": Key(
            f"{mine}.profile_token_start",
            ("profile_token_start", "profile_token_windows"),
            _start,
            since=TOKENS_SINCE,
        ),
        "profile_token_end": Key(
            f"{mine}.profile_token_end", ("profile_token_end", "profile_token_windows"), _end, since=TOKENS_SINCE
        ),
    }
    if tool == "npu":
        table["level"] = Key(
            f"{mine}.level",
            ("level",),
            lambda facts: facts.settings.level,
            default="level0",
            inherits=f"{inherited}.level",
        )
        table["analysis"] = Key(
            f"{mine}.analysis",
            ("analysis",),
            lambda facts: facts.settings.analysis,
            default=False,
            inherits=f"{inherited}.analysis",
        )
    for role, node in _ROLE_NODES.items():
        table[f"{role}.enable"] = Key(f"{node}.enable", ("roles",), _enabled(role), default=False)
        table[f"{role}.all_ranks"] = Key(
            f"{node}.all_ranks", ("all_ranks",), lambda facts: facts.settings.all_ranks, default=False
        )
        table[f"{role}.ranks"] = Key(f"{node}.ranks", ("ranks",), lambda facts: list(facts.settings.ranks), default=[])
    return {name: key for name, key in table.items() if version is None or version >= key.since}


def contradiction(key: Key, facts: Facts, found: Any, prefix: str) -> ConfigError | None:
    """What to say when verl's `key` holds another value than the preset's; None when it agrees.

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
    if not key.fields:
        return ConfigError(key.path, found, f"contradicts {prefix[:-1]}, which needs {wanted!r}: {key.why}")
    fields = " and ".join(prefix + name for name in key.fields)
    return ConfigError(key.path, found, f"contradicts {fields}, which makes it {wanted!r}: set that instead")


def parse_steps(value: object, key: str) -> tuple[int, ...]:
    """RL steps, ascending, each once.

    Raises:
        ConfigError: not a list of step numbers, or empty.
    """
    allowed = "must be a list of RL steps, integers from 1, as in [2] or [2,10]"
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
        raise ConfigError(key, value, allowed)
    for step in value:
        # 0 is taken, and warned about: it stands in many a launch, and does no harm
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_TOKEN:
            raise ConfigError(key, list(value), allowed)
    return tuple(sorted(set(value)))


def parse_roles(value: object, key: str) -> tuple[str, ...]:
    """Roles to profile, each once.

    Raises:
        ConfigError: an unknown role, or no rollout.
    """
    allowed = f"must be a list of {', '.join(ROLES)}"
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ConfigError(key, value, allowed)
    for role in value:
        if not isinstance(role, str) or role not in ROLES:
            raise ConfigError(key, list(value), allowed)
    if "rollout" not in value:
        raise ConfigError(key, list(value), "must name rollout, which is what has response tokens")
    return tuple(dict.fromkeys(value))


def parse_version(text: str | None) -> Version:
    """verl's version; unknown or unreadable: the newest that the tables know."""
    try:
        return Version(text) if text else GLOBAL_RANKS_SINCE
    except InvalidVersion:
        return GLOBAL_RANKS_SINCE


def engine_ranks(ranks: Sequence[int], replica_size: int) -> tuple[int, ...]:
    """Global GPU ranks as ranks within their replica's engine, which is what an engine process knows itself by."""
    return tuple(sorted({rank % replica_size for rank in ranks}))


def launch_warnings(facts: Facts, total_steps: int | None, gpus: int | None, prefix: str) -> list[str]:
    """What is no error and is likely to surprise.

    Args:
        total_steps: of the training, where the config says it.
        gpus: that the rollout runs on, likewise.
    """
    told = []
    if 0 in facts.steps:
        told.append(f"{prefix}steps={list(facts.steps)}: verl's first step is 1, so that 0 profiles nothing")
    late = [step for step in facts.steps if total_steps is not None and step > total_steps]
    if late:
        told.append(f"{prefix}steps: {late} will not be reached: the training has {total_steps} steps")
    absent = [rank for rank in facts.settings.ranks if gpus is not None and rank >= gpus]
    if absent and not facts.settings.all_ranks:
        told.append(f"{prefix}ranks: {absent} do not exist: the rollout has {gpus} GPUs, counted from 0")
    replicas = {rank // facts.replica_size for rank in facts.settings.ranks}
    asked = engine_ranks(facts.settings.ranks, facts.replica_size)
    if facts.settings.all_ranks:
        return told
    if facts.settings.arm == "job" and gpus is not None and gpus > facts.replica_size:
        told.append(
            f"{prefix}arm=job: no replica is told to profile or not to, so that ranks {list(asked)} of each of the"
            f" {gpus // facts.replica_size} replicas capture"
        )
    elif len(replicas) * len(asked) != len(facts.settings.ranks):
        told.append(
            f"{prefix}ranks={list(facts.settings.ranks)}: an engine knows its ranks within its replica only, so that"
            f" ranks {list(asked)} of each of the replicas {sorted(replicas)} capture"
        )
    return told
