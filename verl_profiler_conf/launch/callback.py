"""The Hydra callback: it calls `activate` with the job's config when a job starts, and closes it when the job ends."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.schema.register import LOADED, register_resolver
from verl_profiler_conf.schema.versions import HYDRA

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_profiler_conf.launch.ending import Ending
    from verl_profiler_conf.launch.job import Job

log = logging.getLogger(__name__)

_callbacks: weakref.WeakSet[ProfilerCallback] = weakref.WeakSet()


class StopJob(SystemExit):
    """Ends the run with status 1 and one line. With any other exception of a callback, Hydra warns and continues the
    job."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Hydra 1.4 attaches the whole job to the exception. The exception could then not be pickled to the launching
        # process, and the sweep would wait for this worker for ever.
        return SystemExit, self.args


@dataclass(eq=False)
class ProfilerCallback(Callback):
    """In MULTIRUN one object serves every job. Each job has a window of its own."""

    # Hydra makes the object from this typed node. A `_target_` would work on 1.3, but 1.4 warns about every callback
    # that has one, and refuses it in an app that restricts its targets.
    _convert_: str = "object"

    def __new__(cls, *_: Any, **__: Any) -> ProfilerCallback:
        made = super().__new__(cls)
        _callbacks.add(made)  # not in `__post_init__`: a launcher's worker process unpickles its callback
        return made

    def __post_init__(self) -> None:
        self._job: Job | None = None

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        _check_composition(config)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        from verl_profiler_conf.launch.job import activate

        _check_composition(config)
        try:
            self._job = activate(config, run_dir=config.hydra.runtime.output_dir)
            self._job.under_hydra = True
        except ConfigError as error:
            raise StopJob(str(error)) from None
        except Exception as error:  # only with on_error: raise
            raise StopJob(f"profiling could not start: {type(error).__name__}: {error}") from error

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:  # noqa: ARG002 - Hydra's signature
        job, self._job = self._job, None
        if job is None:
            return
        try:
            job.close(_ending(job_return))
        except Exception as error:  # only with on_error: raise; a job that failed keeps its own exception
            if job_return.status == JobStatus.COMPLETED:
                raise StopJob(f"profiling failed: {type(error).__name__}: {error}") from error


def _ending(job_return: JobReturn) -> Ending:
    from verl_profiler_conf.launch.ending import FAILED, RETURNED, by_error

    if job_return.status != JobStatus.FAILED:
        return RETURNED
    error = getattr(job_return, "_return_value", None)  # `return_value` raises the job's error, and prints
    return by_error(error) if isinstance(error, BaseException) else FAILED


def _check_composition(config: DictConfig) -> None:
    from verl_profiler_conf.launch.composition import composition_loss

    reason = composition_loss(config)
    if reason is not None:
        raise StopJob(reason)


def resolve_loaded() -> str:
    """Return `loaded`, or stop a sweep in which the callback is missing.

    In MULTIRUN Hydra loads callbacks once, before it applies sweep values. `sweep.py` later adds the callback of an
    option that is swept over. Where that was not possible, the job would silently profile nothing.
    """
    if HydraConfig.initialized() and not _callbacks:
        hydra = HydraConfig.instance().cfg.hydra  # type: ignore[union-attr]
        in_job = not OmegaConf.is_missing(hydra.runtime, "output_dir")  # missing in `--cfg hydra --resolve`
        if in_job and hydra.mode is not None and hydra.mode.name == "MULTIRUN":
            raise StopJob(
                "profiler: this sweep selects an option for some of its jobs, and this Hydra loads no callback for it,"
                " so nothing would be profiled; select the option for the whole sweep, on the command line or in the"
                " app's defaults list, and sweep over profiler.enable"
            )
    return "loaded"


def warn_of_pickled_rerun(arguments: Sequence[str]) -> None:
    """Hydra 1.3 calls no callback in a rerun of a pickled job. Unpickling that job's config imports this module."""
    if HYDRA < (1, 4) and any(argument.startswith("--experimental-rerun") for argument in arguments):
        log.warning(
            "profiler: --experimental-rerun of Hydra 1.3 calls no callback, so nothing is profiled;"
            " to profile, rerun with --config-path RUN/.hydra --config-name config"
        )


register_resolver(LOADED, resolve_loaded)
warn_of_pickled_rerun(sys.argv[1:])
