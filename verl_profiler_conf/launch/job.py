"""One job with a window: from its config to the summary.

with activate(cfg):  # for compose() and notebooks; under @hydra.main the callback does the same
    rollout(cfg)
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from omegaconf import DictConfig

from verl_profiler_conf.core.asked import Asked
from verl_profiler_conf.core.logs import forget_reasons
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.launch.announcement import announce
from verl_profiler_conf.launch.checking import Checked, check_config
from verl_profiler_conf.launch.collect import Collector, collect
from verl_profiler_conf.launch.ending import RETURNED, SIGTERM, Ending, at_exit, by_error, last_uncaught
from verl_profiler_conf.launch.folder import prepare_folders
from verl_profiler_conf.launch.planning import PLAN_NAME, leave
from verl_profiler_conf.launch.remote import RemoteFolder
from verl_profiler_conf.launch.report import warn_of_missing_extra, write_report
from verl_profiler_conf.launch.termination import close_on_sigterm, forget_sigterm, sigterm_waits
from verl_profiler_conf.launch.variable import check_size, withhold
from verl_profiler_conf.schema.nodes import find_windows
from verl_profiler_conf.verl.preset.launch_config import TOOLS
from verl_profiler_conf.verl.ray_env import JOB_CONFIG, with_variable

log = logging.getLogger(__name__)

_active: Job | None = None


def activate(config: DictConfig | Settings, *, run_dir: str | Path | None = None) -> Job:
    """Capture the window in everything that runs from here until the job is closed.

    The window applies to this process and to the processes that it starts. With a config that has no window the job
    does nothing. With `profiler=none` or `enable: false` nothing is captured, although an outer job may have a window.

    Args:
        config: any config with a `profiler` option somewhere in it, or validated settings.
        run_dir: captures go to `<run_dir>/profile` when `save_path` is null. None: the working directory.

    Raises:
        ConfigError: a setting is wrong, or its folder cannot be written; one line.
    """
    if PLAN_NAME in os.environ and not isinstance(config, Settings):
        leave([config], under_hydra=False)
    if isinstance(config, Settings):
        checked = Checked(config, is_switched_off=not config.enable)
    else:
        checked = check_config(config)
    settings = checked.settings
    if settings is None or not settings.enable:
        return Job(None, give_back=withhold() if checked.is_switched_off else None)
    over_ray = not isinstance(config, Settings) and any(node.option in TOOLS for node in find_windows(config))
    folder, remote = prepare_folders(settings, run_dir, prefix=checked.prefix, over_ray=over_ray)
    settings = replace(settings, save_path=str(folder), run_id=settings.run_id or uuid.uuid4().hex[:12])
    check_size(settings, checked.prefix, over_ray=over_ray)
    return Job(settings, over_ray=over_ray, asked=checked.asked, remote=remote)


class Job:
    """A job from `activate` to `close`. Also a context manager.

    Attributes:
        settings: with an absolute `save_path` and the job's `run_id`; None for a job that does nothing.
        under_hydra: Hydra runs the job, and reports its end.
    """

    under_hydra = False

    def __init__(
        self,
        settings: Settings | None,
        *,
        over_ray: bool = False,
        asked: Asked | None = None,
        remote: RemoteFolder | None = None,
        give_back: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings
        self._give_back = give_back
        self._asked = asked
        self._remote = remote
        self._collector: Collector | None = None
        self._over_ray = over_ray
        self._pid = os.getpid()
        self._closed = settings is None
        self._ending = RETURNED
        self._uncaught_before = last_uncaught()
        self._end = threading.RLock()
        self._before: dict[str, str | None] = {}
        if settings is not None:
            self._attempt([lambda: self._open(settings)])

    def _open(self, settings: Settings) -> None:
        global _active
        from verl_profiler_conf.engines import install_in_process_hooks
        from verl_profiler_conf.engines.torch_rank import is_reporting_rank, torch_place

        if _active is not None:
            log.warning("another window is active: it is closed, and the new one replaces it")
            _active.close()
        _active = self
        forget_reasons()
        self._publish(ENV_NAME, settings.to_json())
        if self._over_ray:  # Processes of an existing cluster do not inherit this environment.
            self._publish(JOB_CONFIG, with_variable(os.environ.get(JOB_CONFIG), ENV_NAME, settings.to_json()))
        # Hydra 1.3 does not call callbacks at the job's end after Ctrl-C and sys.exit.
        atexit.register(self._close_at_exit)
        close_on_sigterm(self._close_on_sigterm)
        install_in_process_hooks(settings)
        self._collector = collect(settings, self._asked, over_ray=self._over_ray)
        if is_reporting_rank(settings.ranks, all_ranks=settings.all_ranks):
            announce(settings, self._remote.url if self._remote is not None else None)
            warn_of_missing_extra(settings)
        else:
            log.info("rank %d of %d does not capture (ranks: %s)", *torch_place(), list(settings.ranks))

    def close(self, ending: Ending = RETURNED) -> None:
        """Finish the traces, restore the environment and log the summary.

        A second call does nothing. A call from another thread, or on SIGTERM, waits for one that is under way.

        Args:
            ending: how the job ended, for the summary.
        """
        if self.settings is None:
            give_back, self._give_back = self._give_back, None
            if give_back is not None:
                give_back()
            return
        if os.getpid() != self._pid:
            # a forked child that ends by sys.exit; the thread that held the lock does not exist here
            self._mark_closed()
            return
        with self._end, sigterm_waits():
            if not self._closed:
                self._mark_closed()
                self._ending = ending
                self._attempt([self._finish, self._collect, self._withdraw, self._summarise, self._report])

    def _close_at_exit(self) -> None:
        self.close(at_exit(self._uncaught_before, under_hydra=self.under_hydra))

    def _close_on_sigterm(self) -> None:
        self.close(SIGTERM)

    def _mark_closed(self) -> None:
        global _active
        self._closed = True
        if _active is self:
            _active = None

    def _finish(self) -> None:
        from verl_profiler_conf.capture.session import close_all
        from verl_profiler_conf.engines import remove_in_process_hooks

        remove_in_process_hooks()
        close_all("job_end")

    def _collect(self) -> None:
        if self._collector is not None:
            self._collector.finish()

    def _withdraw(self) -> None:
        atexit.unregister(self._close_at_exit)
        forget_sigterm()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _publish(self, name: str, value: str) -> None:
        self._before[name] = os.environ.get(name)
        os.environ[name] = value

    def _summarise(self) -> None:
        from verl_profiler_conf.launch.summary import summarise

        if self.settings is not None:
            summarise(
                self.settings,
                asked=self._asked,
                collector=self._collector,
                remote=self._remote,
                ending=self._ending,
            )

    def _report(self) -> None:
        """Write the report. It comes after the summary, which must not be lost if the process is ended meanwhile."""
        if self.settings is not None and self._remote is None:
            write_report(self.settings, Path(self.settings.save_path or ""))

    def _attempt(self, steps: list[Callable[[], None]]) -> None:
        """Run every step, also after one has failed. Failures are logged, and raised only under `on_error: raise`.
        Ctrl-C ends the step that it comes in, and is raised after the others."""
        failure: Exception | None = None
        interrupt: KeyboardInterrupt | None = None
        for step in steps:
            try:
                step()
            except Exception as error:
                failure = failure or error
                log.warning("profiling: %s: %s; the job goes on", type(error).__name__, error)
                log.debug("traceback of the failure", exc_info=error)
            except KeyboardInterrupt as error:
                interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt
        if failure is not None and self.settings is not None and self.settings.on_error == "raise":
            raise failure

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close(by_error(error))
        except Exception:
            if error is None:  # The job's own exception comes first.
                raise
