"""`verl-profiler plan -- COMMAND`: a launch that tells what it would profile, and ends before its task starts.

The command line sets `PLAN_NAME`. Hydra then makes the callback of this module in every app, whether it has selected an
option or not. The callback runs before Hydra makes a folder or calls the task: it writes what is known into a file, and
ends the process.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from verl_profiler_conf.engines.torch_rank import torch_place
from verl_profiler_conf.schema.overrides import written_overrides

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader

PLAN_NAME = "VERL_PROFILER_CONF_PLAN"
"""Environment variable with the folder that the processes of a planned launch write their reports to."""

CALLBACK = "verl_profiler_conf_plan"
OWN_VARIABLE = "VERL_PROFILER_CONF_CALLBACK"
"""Variable of the option's own callback, which says nothing to a plan."""

MOST_JOBS = 16
"""Jobs of a sweep that are planned one by one."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class PlanCallback(Callback):
    """Ends the launch with a report. Hydra makes it from this typed node, as the option's own callback."""

    _convert_: str = "object"

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        leave([config])

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        leave(sweep_jobs(config), sweep=True, sweeper=choosing_sweeper(config))


def add_plan_callback() -> None:
    """Have Hydra make the callback in every launch of this process."""
    node: Any = ConfigStore.instance().repo["hydra"]["config.yaml"].node
    with read_write(node), open_dict(node):
        node.callbacks[CALLBACK] = OmegaConf.structured(PlanCallback)


def choosing_sweeper(config: DictConfig) -> str | None:
    """The sweeper of a sweep whose jobs are not known beforehand: it chooses them while it runs. None: they are."""
    target = str(OmegaConf.select(config, "hydra.sweeper._target_"))
    return None if target.endswith(".BasicSweeper") else target


def sweep_jobs(config: DictConfig) -> Iterator[DictConfig]:
    """The configs of a sweep's jobs, as Hydra's own sweeper makes them; of another, the config without values."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if choosing_sweeper(config) is not None:
        yield numbered(config.copy(), 0)
        return
    loader: ConfigLoader = GlobalHydra.instance().config_loader()
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    given = [*(f"{key}={value}" for key, value in params.items()), *(written_overrides(config, "task") or ())]
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(given)
    batch = BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
    for number, overrides in enumerate(batch):
        yield numbered(loader.load_sweep_config(config, overrides), number)


def numbered(job: DictConfig, number: int) -> DictConfig:
    """A sweep's job with its number, as Hydra's launchers set it before the job starts."""
    of_job = job.hydra.job
    with read_write(of_job), open_dict(of_job):
        of_job.id, of_job.num = str(number), number
    return job


def leave(
    configs: Iterable[DictConfig], *, sweep: bool = False, sweeper: str | None = None, under_hydra: bool = True
) -> None:
    """Write the report of this process and end it, whatever the app would do about an exit.

    Args:
        configs: of the jobs.
        sweep: they are those of a sweep.
        sweeper: what chooses the sweep's values while it runs, so that `configs` is the one without them.
        under_hydra: the configs have a `hydra` node, which a job's start would complete.
    """
    from verl_profiler_conf.launch.planned import describe

    report: dict[str, Any] = {"python": sys.executable, "argv": sys.argv, "rank": torch_place()[0], "sweep": sweep}
    report["world"] = torch_place()[1]
    report["base_of"] = sweeper
    jobs: list[dict[str, Any]] = []
    try:
        if report["rank"] == 0:  # the others only stop
            for config in configs:
                if len(jobs) == MOST_JOBS:
                    report["cut_at"] = MOST_JOBS
                    break
                if under_hydra:
                    enter(config, sweep=sweep)
                jobs.append(describe(config))
    except Exception as error:  # a launch that is planned is never run
        jobs.append({"problems": [f"the plan failed: {type(error).__name__}: {str(error).strip()}"]})
    write_report({**report, "jobs": jobs})
    stop()


def enter(config: DictConfig, *, sweep: bool = False) -> None:
    """What Hydra does to a job's config between here and its start: the output folder, the job's variables."""
    HydraConfig.instance().set_config(config)
    place = OmegaConf.select(config, "hydra.sweep.dir" if sweep else "hydra.run.dir")
    if sweep:
        place = os.path.join(str(place), str(OmegaConf.select(config, "hydra.sweep.subdir")))  # noqa: PTH118 - as Hydra
    with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
        config.hydra.runtime.output_dir = str(Path(str(place)).absolute())
    HydraConfig.instance().set_config(config)
    for name in config.hydra.job.env_set:
        if name != OWN_VARIABLE:
            os.environ[str(name)] = str(config.hydra.job.env_set[name])


def write_report(report: dict[str, Any]) -> None:
    """Into the folder that the variable names: a file for each process, whole or not at all."""
    from verl_profiler_conf.capture.files import write_atomically

    folder = Path(os.environ[PLAN_NAME])
    write_atomically(folder / f"{report['rank']:06d}-{os.getpid()}.json", json.dumps(report, default=str).encode())


def stop() -> None:
    """End the process with status 0. An app may catch SystemExit and go on, so the exit handlers are called here."""
    run_exit_handlers = getattr(atexit, "_run_exitfuncs", None)
    try:
        if run_exit_handlers is not None:
            run_exit_handlers()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)
