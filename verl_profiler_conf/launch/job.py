"""One job with a window: from its config to the summary.

with activate(cfg):  # for compose() and notebooks; under @hydra.main the callback does the same
    rollout(cfg)
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.core.asked import Asked
from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.settings import ENV_NAME, FOREIGN_CONTENTS, OPTIONS, Settings
from verl_profiler_conf.core.window import WINDOWS_KEY
from verl_profiler_conf.launch.collect import Collector, collect
from verl_profiler_conf.launch.folder import prepare_folders
from verl_profiler_conf.launch.provenance import check_place
from verl_profiler_conf.launch.remote import RemoteFolder
from verl_profiler_conf.launch.termination import close_on_sigterm, forget_sigterm, sigterm_waits
from verl_profiler_conf.schema.nodes import COMPUTED, NONE, WindowNode, find_windows
from verl_profiler_conf.verl.preset.asked import asked_captures
from verl_profiler_conf.verl.preset.checks import check_launch
from verl_profiler_conf.verl.preset.launch_config import TOOLS, check_trainer, read_launch
from verl_profiler_conf.verl.preset.schema import VerlFields as _VerlFields  # noqa: F401 - makes the presets known
from verl_profiler_conf.verl.ray_env import JOB_CONFIG, with_variable

log = logging.getLogger(__name__)

MOST_BYTES = 120_000
"""Bytes of the settings as an environment variable. Linux starts no process with one of 131,072 or more, and Ray's
variable holds the settings once more, quoted."""

_active: Job | None = None


def activate(config: DictConfig | Settings, *, run_dir: str | Path | None = None) -> Job:
    """Capture the window in everything that runs from here until the job is closed.

    The window applies to this process and to the processes that it starts. With a config that has no window, or with
    `enable: false`, the job does nothing.

    Args:
        config: any config with a `profiler` option somewhere in it, or validated settings.
        run_dir: captures go to `<run_dir>/profile` when `save_path` is null. None: the working directory.

    Raises:
        ConfigError: a setting is wrong, or its folder cannot be written; one line.
    """
    checked = Checked(config) if isinstance(config, Settings) else check_config(config)
    settings = checked.settings
    if settings is None or not settings.enable:
        return Job(None)
    over_ray = not isinstance(config, Settings) and any(node.option in TOOLS for node in find_windows(config))
    folder, remote = prepare_folders(settings, run_dir, prefix=checked.prefix, over_ray=over_ray)
    settings = replace(settings, save_path=str(folder), run_id=settings.run_id or uuid.uuid4().hex[:12])
    _check_size(settings, checked.prefix)
    return Job(settings, over_ray=over_ray, asked=checked.asked, remote=remote)


def validate(config: DictConfig) -> Settings | None:
    """The resolved and checked settings of a config's window; None when no option is selected.

    Every window node is checked, also those with `enable: false`. At most one may be enabled.

    Raises:
        ConfigError: one line with the full key, the value and what is allowed.
    """
    return check_config(config).settings


@dataclass(frozen=True)
class Checked:
    """What the checks of a config found.

    Attributes:
        settings: of its window; None: no option is selected.
        asked: what a preset knows to be asked for.
        prefix: path of the node with a dot at its end, to put before a key in a message.
    """

    settings: Settings | None
    asked: Asked | None = None
    prefix: str = ""


def check_config(config: DictConfig) -> Checked:
    """Check every window node of a config.

    Raises:
        ConfigError: one line with the full key, the value and what is allowed.
    """
    found: dict[str, Settings] = {}
    asked = None
    for node in find_windows(config):
        if node.option == NONE:
            continue
        check_trainer(config, node)
        check_place(config, node)
        settings = node.settings()
        _check_computed(node, settings)
        if node.option in TOOLS:
            launch = read_launch(config, node)
            settings, asked = check_launch(launch), asked_captures(launch)
        found[node.path] = settings
    enabled = [path for path, settings in found.items() if settings.enable]
    if len(enabled) > 1:
        first, second = enabled[:2]
        raise ConfigError(
            f"{second}.enable", True, f"a job has one window, and {first} is another; set enable=false in one of them"
        )
    path = next(iter([*enabled, *found]), None)
    if path is None:
        return Checked(None)
    return Checked(found[path], asked, f"{path}." if path else "")


def _check_size(settings: Settings, prefix: str) -> None:
    """Refuse settings that do not fit into an environment variable: no process could be started any more."""
    size = len(ENV_NAME) + 1 + len(settings.to_json())
    if size > MOST_BYTES:
        raise ConfigError(
            prefix + WINDOWS_KEY,
            f"{len(settings.windows)} windows",
            f"too many: the settings take {size:,} bytes with them, and an environment variable has {MOST_BYTES:,}",
        )


def _check_computed(node: WindowNode, settings: Settings) -> None:
    """Refuse counters that the user has set: they are computed, and a value of the user's would have no effect."""
    from verl_profiler_conf.counters.plan import counter_values
    from verl_profiler_conf.schema.register import ITERATIONS

    computed: Any = OmegaConf.to_container(node.node, resolve=False)
    for engine, fields in (computed.get(COMPUTED) or {}).items():
        for counter, value in fields.items():
            is_computed = isinstance(value, str) and value.startswith(f"${{{ITERATIONS}:")
            if not is_computed and value != counter_values(settings, engine).get(counter):
                key = f"{node.prefix}{COMPUTED}.{engine}.{counter}"
                raise ConfigError(key, value, "is computed from the window and cannot be set")


class Job:
    """A job from `activate` to `close`. Also a context manager.

    Attributes:
        settings: with an absolute `save_path` and the job's `run_id`; None for a job that does nothing.
    """

    def __init__(
        self,
        settings: Settings | None,
        *,
        over_ray: bool = False,
        asked: Asked | None = None,
        remote: RemoteFolder | None = None,
    ) -> None:
        self.settings = settings
        self._asked = asked
        self._remote = remote
        self._collector: Collector | None = None
        self._over_ray = over_ray
        self._started = time.time()
        self._pid = os.getpid()
        self._closed = settings is None
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
        self._publish(ENV_NAME, settings.to_json())
        if self._over_ray:  # Processes of an existing cluster do not inherit this environment.
            self._publish(JOB_CONFIG, with_variable(os.environ.get(JOB_CONFIG), ENV_NAME, settings.to_json()))
        # Hydra 1.3 does not call callbacks at the job's end after Ctrl-C and sys.exit.
        atexit.register(self.close)
        close_on_sigterm(self.close)
        install_in_process_hooks(settings)
        self._collector = collect(settings, self._asked, over_ray=self._over_ray)
        if is_reporting_rank(settings.ranks, all_ranks=settings.all_ranks):
            _announce(settings, self._remote.url if self._remote is not None else None)
        else:
            log.info("rank %d of %d does not capture (ranks: %s)", *torch_place(), list(settings.ranks))

    def close(self) -> None:
        """Finish the traces, restore the environment and log the summary.

        A second call does nothing. A call from another thread, or on SIGTERM, waits for one that is under way.
        """
        if self.settings is None:
            return
        if os.getpid() != self._pid:  # a forked child that left through sys.exit; whoever held the lock is not here
            self._mark_closed()
            return
        with self._end, sigterm_waits():
            if not self._closed:
                self._mark_closed()
                self._attempt([self._finish, self._collect, self._withdraw, self._summarise])

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
        atexit.unregister(self.close)
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
                since=self._started,
                asked=self._asked,
                collector=self._collector,
                remote=self._remote,
            )

    def _attempt(self, steps: list[Callable[[], None]]) -> None:
        """Run every step, also after one has failed. Failures are logged, and raised only under `on_error: raise`."""
        failure: Exception | None = None
        for step in steps:
            try:
                step()
            except Exception as error:
                failure = failure or error
                log.warning("profiling: %s: %s; the job goes on", type(error).__name__, error)
                log.debug("traceback of the failure", exc_info=error)
        if failure is not None and self.settings is not None and self.settings.on_error == "raise":
            raise failure

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # The job's own exception comes first.
                raise


def _announce(settings: Settings, url: str | None) -> None:
    """Log the window, and what may surprise the user."""
    from verl_profiler_conf.capture.backends.detect import detect_device

    device = detect_device(settings.device)
    windows = ", ".join(map(str, settings.windows))
    if settings.mapping == "tokens":
        where = settings.save_path if url is None else f"{settings.save_path}, and at the job's end to {url}"
        log.info("waiting for response tokens %s on %s; captures go to %s", windows, device, where)
    for window in settings.windows:
        if window.is_open and settings.max_iterations is None:
            log.warning("the window %s has no end: its trace grows as long as the response does", window)
    devices = OPTIONS[settings.option].devices
    if device not in devices:
        log.warning(
            "%s needs %s, and this process finds none: only engine processes on other machines could capture",
            settings.option,
            devices[-1],
        )
    foreign = [item for item in settings.contents if item in FOREIGN_CONTENTS[device]]
    if foreign:
        log.warning("contents %s cannot be recorded on %s, the device of this process", ", ".join(foreign), device)
    if settings.mapping == "iterations":
        _announce_counters(settings)


def _announce_counters(settings: Settings) -> None:
    from verl_profiler_conf.counters.plan import counter_plan

    for engine in ("vllm", "sglang"):
        if settings.engine.get("name", engine) in (engine, "auto"):
            plan = counter_plan(settings, engine)
            log.log(logging.INFO if plan.fit.exact and not plan.assumes else logging.WARNING, "%s", plan)
