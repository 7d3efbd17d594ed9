"""The environment variable that carries the window: whether the settings fit into it, and what an outer job left in it.

A job's processes inherit the variable. One of them may be a Hydra app with a config of its own. If that config switches
profiling off (`profiler=none`, `enable: false`), the variable is taken away. A config without any option leaves the
variable alone, so a worker of the job gets the window.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.core.window import WINDOWS_KEY
from verl_profiler_conf.verl.ray_env import JOB_CONFIG, with_variable, without_variable

MOST_BYTES = 120_000
"""Bytes of one variable. Linux starts no process with one of 131,072 or more, and what Ray's own variable holds besides
the settings has to fit as well."""


def check_size(settings: Settings, prefix: str, *, over_ray: bool = False) -> None:
    """Refuse settings that do not fit into an environment variable: no process could be started any more.

    Args:
        settings: as they will be published.
        prefix: path of the node with a dot at its end, to put before a key in the message.
        over_ray: Ray's variable has to hold them as well.

    Raises:
        ConfigError: one line that names the longest of the settings.
    """
    text = settings.to_json()
    size = len(ENV_NAME) + 1 + len(text)
    if over_ray:
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # what stands there is not Ray's
            size = max(size, len(JOB_CONFIG) + 1 + len(with_variable(os.environ.get(JOB_CONFIG), ENV_NAME, text)))
    if size <= MOST_BYTES:
        return
    raw = json.loads(text)
    key = max(raw, key=lambda name: len(json.dumps(raw[name])))
    value, too = raw[key], "long"
    if isinstance(value, list):
        value, too = f"{len(value)} {'windows' if key == WINDOWS_KEY else 'entries'}", "many"
    raise ConfigError(
        prefix + key,
        value,
        f"too {too}: the settings take {size:,} bytes with them, and an environment variable has {MOST_BYTES:,}",
    )


def withhold() -> Callable[[], None] | None:
    """Take the window away from this process and from those that it starts.

    Returns:
        A function that restores the window when the job has ended. None: no window was inherited.
    """
    if ENV_NAME not in os.environ:
        return None
    before = {name: os.environ[name] for name in (ENV_NAME, JOB_CONFIG) if name in os.environ}
    os.environ.pop(ENV_NAME)
    if JOB_CONFIG in before:
        os.environ[JOB_CONFIG] = without_variable(before[JOB_CONFIG], ENV_NAME)
    in_process = sys.modules.get("verl_profiler_conf.engines.in_process")
    in_force = in_process.settings_of_the_job() if in_process is not None else None
    if in_process is not None:
        in_process.put_in_force(None)

    def give_back() -> None:
        os.environ.update(before)
        if in_process is not None:
            in_process.put_in_force(in_force)

    return give_back
