"""An environment variable for every process of a Ray job, wherever its cluster was started.

Processes of a cluster that this process starts inherit its environment, those of an existing cluster do not. Ray takes
what they shall have from `ray.init(runtime_env=...)` and from a variable through which its own job submission hands a
driver its runtime environment; `ray.init` merges the two. Tried with Ray 2.60 on a cluster that it started and on an
existing one.

It cannot come through verl's key `ray_kwargs.ray_init.runtime_env.env_vars`: verl gives that to Ray unresolved
(`OmegaConf.to_container` without `resolve`), and no plain text can hold a window that is set later on the command line.
"""

from __future__ import annotations

import json
from typing import Any

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Name of that variable: the `_ENV_VAR` is part of it (`ray/_private/runtime_env/constants.py`)."""


def with_variable(job_config: str | None, name: str, value: str) -> str:
    """The text of `RAY_JOB_CONFIG_JSON_ENV_VAR` with one more environment variable; whatever else it holds is kept.

    Args:
        job_config: its text so far; None: not set.
    """
    config: dict[str, Any] = json.loads(job_config) if job_config else {}
    runtime_env = config.get("runtime_env") or {}
    variables = runtime_env.get("env_vars") or {}
    config["runtime_env"] = {**runtime_env, "env_vars": {**variables, name: value}}
    return json.dumps(config)
