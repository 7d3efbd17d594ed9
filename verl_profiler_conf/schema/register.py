"""The names under which the package registers with Hydra. Every Hydra app imports this module, so it is light."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

from verl_profiler_conf.schema.versions import OMEGACONF

PARTS = "verl_profiler_conf"
"""Config group of the parts of the options: their schemas, verl's keys, and the callback."""
OPTIONS = (
    "torch_window",
    "npu_window",
    "torch_memory",
    "nsys_window",
    "verl_torch_window",
    "verl_npu_window",
    "none",
)
"""Names in the config group `profiler`."""

ITERATIONS = "verl_profiler_conf.iterations"
"""Resolver `${verl_profiler_conf.iterations:<engine>,<counter>}`, used two levels below a window node."""

VERL = "verl_profiler_conf.verl"
"""Resolver `${verl_profiler_conf.verl:<name>}`: the value of one of verl's keys."""

LOADED = "verl_profiler_conf.loaded"
"""Resolver `${verl_profiler_conf.loaded:}`. Hydra resolves it for each job, before `on_job_start`."""


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register a resolver, also a second time: Hydra may run a plugin module again."""
    # OmegaConf 2.4 renames register_new_resolver to register_resolver and warns about the old name. Before 2.4,
    # register_resolver is another function.
    register: Any = OmegaConf.register_resolver if OMEGACONF >= (2, 4) else OmegaConf.register_new_resolver
    register(name, resolver, replace=True)
