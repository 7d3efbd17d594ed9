"""What Hydra calls when a job starts and ends: it hands the job's config to `activate`, and closes what that opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback

from verl_profiler_conf.window import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_profiler_conf.job import Job


@dataclass
class ProfilerCallback(Callback):
    """In MULTIRUN one object serves job after job, each with a window of its own."""

    # Hydra makes the object from this typed node itself. A `_target_` would do as well on 1.3, but 1.4 warns about
    # every callback that has one, and refuses it in an app that restricts its targets.
    _convert_: str = "object"

    def __post_init__(self) -> None:
        self._job: Job | None = None

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        from verl_profiler_conf.job import activate

        try:
            self._job = activate(config, run_dir=config.hydra.runtime.output_dir)
        except ConfigError as error:
            # Hydra turns exceptions of a callback into warnings and runs the job; this one ends it, with status 1
            raise SystemExit(str(error)) from None
        except Exception as error:  # comes here with on_error: raise only
            raise SystemExit(f"profiling could not start: {type(error).__name__}: {error}") from error

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:  # noqa: ARG002 - Hydra's signature
        job, self._job = self._job, None
        if job is None:
            return
        try:
            job.close()
        except Exception as error:  # as above; a job that failed keeps its own exception
            if job_return.status == JobStatus.COMPLETED:
                raise SystemExit(f"profiling failed: {type(error).__name__}: {error}") from error
