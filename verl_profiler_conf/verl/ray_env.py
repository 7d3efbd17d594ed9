"""Gives an environment variable to every process of a Ray job, also on a cluster that runs already.

Processes of a cluster that this process starts inherit its environment. Those of an existing cluster do not. Ray takes
their variables from `ray.init(runtime_env=...)`, and from a variable of its own, in which `ray job submit` gives a
driver its runtime environment. `ray.init` merges the two. This was tried with Ray 2.60 on a cluster that it started and
on an existing one.

verl's key `ray_kwargs.ray_init.runtime_env.env_vars` cannot carry the window: verl gives that key to Ray unresolved
(`OmegaConf.to_container` without `resolve`), and no plain text can hold a window that the command line sets later.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Name of Ray's variable; `_ENV_VAR` is part of it. It is private: `ray/_private/runtime_env/constants.py`."""

READER = Path("_private", "worker.py")
"""Where `ray.init` reads the variable, in Ray's package."""


def with_variable(job_config: str | None, name: str, value: str) -> str:
    """The text of `RAY_JOB_CONFIG_JSON_ENV_VAR` with one more environment variable. The rest of it is kept.

    Args:
        job_config: its text so far; None: not set.
    """
    config: dict[str, Any] = json.loads(job_config) if job_config else {}
    runtime_env = config.get("runtime_env") or {}
    variables = runtime_env.get("env_vars") or {}
    config["runtime_env"] = {**runtime_env, "env_vars": {**variables, name: value}}
    return json.dumps(config)


def without_variable(job_config: str, name: str) -> str:
    """The text of `RAY_JOB_CONFIG_JSON_ENV_VAR` without one environment variable. A text of another form is kept."""
    try:
        config: dict[str, Any] = json.loads(job_config)
        del config["runtime_env"]["env_vars"][name]
    except (ValueError, TypeError, KeyError):
        return job_config
    return json.dumps(config)


def job_config_is_read() -> bool:
    """Whether the installed Ray still reads the variable. Otherwise the window would be lost in silence.

    Ray's own source is searched, because importing Ray takes seconds. True where Ray is not installed.
    """
    try:
        spec = find_spec("ray")
    except (ImportError, ValueError):
        return True
    folders = list((spec.submodule_search_locations if spec else None) or ())
    return not folders or any(_names(Path(folder, READER)) for folder in folders)


def _names(file: Path) -> bool:
    try:
        return JOB_CONFIG in file.read_text(encoding="utf-8")
    except OSError:
        return False
