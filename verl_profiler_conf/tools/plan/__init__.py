"""What a window would do, before it runs: of a launch, of a composed config, or of bare numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler_conf.tools.plan.counters import plan_table

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["plan", "plan_table"]


def plan(
    config: DictConfig, *, like: Path | None = None, max_size: int | None = None, layers: int | None = None
) -> dict[str, Any]:
    """The plan of a config of compose(), as plain values; `problems` is empty where nothing is wrong.

    Args:
        config: with a `profiler` option somewhere in it.
        like: folder of an earlier run, whose manifests say what an iteration costs.
        max_size: bytes that the traces may take.
        layers: of the model, for an estimate without `like`.
    """
    from verl_profiler_conf.launch.planned import describe
    from verl_profiler_conf.tools.plan.estimate import add_estimate

    job = describe(config)
    add_estimate(job, like=like, max_size=max_size, layers=layers)
    return job
