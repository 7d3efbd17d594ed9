"""The captures that a launch asks its rollout for: in which RL steps, and of which ranks and replicas."""

from __future__ import annotations

from verl_profiler_conf.core.asked import Asked
from verl_profiler_conf.verl.preset.facts import GLOBAL_RANKS_SINCE, TOKENS_SINCE, VerlLaunch, engine_ranks


def asked_captures(launch: VerlLaunch) -> Asked | None:
    """The captures that the launch should leave.

    None where they are not known: verl before 0.9.0 loads no plugin that would name step and replica, the engine's own
    counters leave no manifest, and `all_ranks` needs the number of GPUs.
    """
    facts, settings = launch.facts, launch.facts.settings
    if facts.version < TOKENS_SINCE or settings.mapping != "tokens" or not settings.enable:
        return None
    gpus, size = launch.rollout_gpus, facts.replica_size
    if settings.all_ranks:
        if gpus is None:
            return None
        ranks = set(range(gpus))
    elif facts.version < GLOBAL_RANKS_SINCE:  # the servers know the replicas that are named, and no rank within them
        replicas = {rank // size for rank in settings.ranks}
        ranks = {replica * size + rank for replica in replicas for rank in engine_ranks(settings.ranks, size)}
    else:
        ranks = set(settings.ranks)
    steps = tuple(step for step in facts.steps if step > 0) if settings.arm == "request" else ()
    return Asked(steps, {rank: rank // size for rank in sorted(ranks) if gpus is None or rank < gpus}, settings.windows)
