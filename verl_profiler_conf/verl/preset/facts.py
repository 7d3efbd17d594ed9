"""What is known of a launch of verl, as frozen plain values. verl's keys and the checks depend on nothing else.

Pure: no OmegaConf, no verl. `launch_config` reads these values out of a composed config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.core.window import MAX_TOKEN

OLDEST = Version("0.7.1")
"""First verl whose rollout engines have a profiler of their own."""

TOKENS_SINCE = Version("0.9.0")
"""First verl whose tools take `profile_token_start`. An older verl ends its job at a key that it does not know."""

GLOBAL_RANKS_SINCE = Version("0.9.1")
"""From this verl on, the rollout's `ranks` are global GPU ranks. Before, they are indices of replicas."""

ROLES = ("rollout", "actor", "ref", "critic")
"""What can be profiled. The rollout gets the window. verl's own profiler records the other roles, for whole stages."""

ENGINES = ("vllm", "sglang")
"""Rollout engines that start a profiler on request and can be windowed."""

ROLLOUT_KEY = "actor_rollout_ref.rollout"
ENGINE_KEY = f"{ROLLOUT_KEY}.name"
ENV_KEY = f"ray_kwargs.ray_init.runtime_env.env_vars.{ENV_NAME}"
RESPONSE_KEY = f"{ROLLOUT_KEY}.response_length"
CONTEXT_KEY = f"{ROLLOUT_KEY}.max_model_len"
TURNS_KEY = f"{ROLLOUT_KEY}.multi_turn.enable"
AGENT_KEY = f"{ROLLOUT_KEY}.agent.default_agent_loop"
TOTAL_STEPS_KEY = "trainer.total_training_steps"
USE_V1_KEY = "trainer.use_v1"
ASYNC_TRAINING_KEY = "async_training"
ROLLOUT_NODES_KEY = "rollout.nnodes"
FINISH_KEYS = ("global_profiler.finish_hook_cmd", f"{ROLLOUT_KEY}.profiler.finish_hook_cmd")
GPU_KEYS = ((ROLLOUT_NODES_KEY, "rollout.n_gpus_per_node"), ("trainer.nnodes", "trainer.n_gpus_per_node"))
"""Pairs of keys: how many nodes the rollout has, and how many GPUs each of them. Trainers that give the rollout
resources of its own have the first pair."""

LOOKED_AT = (
    ENGINE_KEY,
    ENV_KEY,
    TOTAL_STEPS_KEY,
    USE_V1_KEY,
    ASYNC_TRAINING_KEY,
    RESPONSE_KEY,
    CONTEXT_KEY,
    TURNS_KEY,
    AGENT_KEY,
    *FINISH_KEYS,
    *(key for pair in GPU_KEYS for key in pair),
)
"""Keys of verl that the checks look at, besides those that a preset sets."""


@dataclass(frozen=True)
class Facts:
    """What the values of verl's keys depend on.

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
class VerlLaunch:
    """A launch of verl, read once from its composed config.

    Attributes:
        option: the preset's name, as in `+profiler=<option>`.
        path: of the preset's node in the config, usually `profiler`.
        written: field of the preset -> its value as written, with interpolations unresolved.
        facts: what the values of verl's keys depend on.
        installed: version of the installed verl; None: none was found.
        ray_reads_window: whether the window reaches the processes of a Ray cluster that was started before the launch.
        values: key of verl -> its value in the composed config, resolved and plain; None: not there, or not set.
            Holds `LOOKED_AT` and the keys that the preset sets.
        own_values: the same keys and those they inherit from -> their value in the launch without its preset. None
            where that is not known.
    """

    option: str
    path: str
    written: Mapping[str, Any]
    facts: Facts
    installed: str | None
    ray_reads_window: bool
    values: Mapping[str, Any]
    own_values: Mapping[str, Any] | None

    @property
    def prefix(self) -> str:
        """Goes before each of the preset's fields in a message."""
        return f"{self.path}." if self.path else ""

    @property
    def rollout_gpus(self) -> int | None:
        """GPUs of all replicas: the trainer's, except in trainers that have resources of their own for the rollout."""
        for pair in GPU_KEYS:
            nodes, gpus_per_node = (self.number(key) for key in pair)
            if nodes is not None and gpus_per_node is not None:
                return nodes * gpus_per_node
        return None

    def number(self, key: str) -> int | None:
        """The value of one of `LOOKED_AT`, where it is an integer."""
        value = self.values[key]
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def parse_steps(value: object, key: str) -> tuple[int, ...]:
    """RL steps, ascending, each once.

    Raises:
        ConfigError: not a list of step numbers, or empty.
    """
    allowed = "must be a list of RL steps, integers from 1, as in [2] or [2,10]"
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
        raise ConfigError(key, value, allowed)
    for step in value:
        # 0 is allowed, with a warning: many launches hold it, and it does no harm
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
    """Global GPU ranks as ranks within the engine of their replica. An engine process knows only its rank there."""
    return tuple(sorted({rank % replica_size for rank in ranks}))
