"""What a rollout server publishes before its engine starts: which replica it is, and which of its ranks capture.

Every server is a Ray actor, so it is a process of its own, and the processes of its engine inherit its environment. The
driver publishes the same window to all servers. Each server then takes its own share of it: a replica without a rank
that was named captures nothing and leaves no file.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

from packaging.version import Version

from verl_profiler_conf.core.place import PLACE_NAME, Place
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.engines.hooking import published_settings
from verl_profiler_conf.verl.preset.facts import GLOBAL_RANKS_SINCE, parse_version
from verl_profiler_conf.verl.preset.launch_config import DEGREES, installed_verl


def publish_share(server: Any) -> None:
    """Put the server's place and its share of the window into this process's environment."""
    settings = published_settings("verl")
    if settings is None or not settings.enable:
        return
    size = 1
    for key in DEGREES:
        size *= int(getattr(server.config, key))
    place = Place(int(server.replica_rank), int(server.replica_rank) * size, _node_address())
    share = share_of(place, size, settings, server.config.profiler, parse_version(installed_verl()))
    os.environ[PLACE_NAME] = place.to_json()
    os.environ[ENV_NAME] = share.to_json()


def share_of(place: Place, size: int, settings: Settings, profiler: Any, version: Version) -> Settings:
    """The settings of one replica.

    Args:
        place: of the replica.
        size: its number of ranks.
        settings: as the driver published them.
        profiler: verl's own profiler config of the rollout; None: this engine has none, for example a reward model's.
        version: of verl, which decides what `profiler.ranks` counts.
    """
    if profiler is None:
        return replace(settings, enable=settings.arm != "request")  # verl will never start its profiler
    if not profiler.enable or profiler.all_ranks or settings.all_ranks:
        return settings  # without `enable` the window is that of a generic option, which knows no replicas
    if version >= GLOBAL_RANKS_SINCE:
        first = place.first_rank
        ranks = tuple(sorted(rank - first for rank in profiler.ranks if first <= rank < first + size))
    else:
        ranks = settings.ranks if place.replica in profiler.ranks else ()
    return replace(settings, ranks=ranks or settings.ranks, enable=bool(ranks))


def _node_address() -> str | None:
    ray: Any = sys.modules.get("ray")
    return None if ray is None else str(ray.util.get_node_ip_address())
