"""What the loops of one engine in one process share: the windows still wanted, the device profiler, the files."""

from __future__ import annotations

import itertools
import threading

from verl_profiler_conf.capture.backends import DeviceProfiler, detect_device, make_profiler
from verl_profiler_conf.capture.form import ManifestForm, Source
from verl_profiler_conf.capture.outputs import CaptureOutputs
from verl_profiler_conf.capture.placeholders import Placeholders
from verl_profiler_conf.capture.writer import Writer, default_writer
from verl_profiler_conf.core.gate import CaptureQuota, Gate, make_gate
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow


class Arming:
    """The windows of one configuration, waited for by the loops of one engine.

    An engine worker is one loop. In the job's own process each `generate` call and each decode loop is one.

    Args:
        settings: validated; `save_path` should be absolute.
        source: where the captures come from.
        profiler: the device profiler; None: made from the settings when the first window is reached, so that a process
            that captures nothing imports nothing.
        writer: writes the traces; None: the one of this process.
        is_shared: several loops wait for the windows, and what one captures the others need not.

    Attributes:
        is_dead: nothing is captured any more: the job is over, a failure came, or this process is a fork.
    """

    def __init__(
        self,
        settings: Settings,
        source: Source,
        *,
        profiler: DeviceProfiler | None = None,
        writer: Writer | None = None,
        is_shared: bool = False,
    ) -> None:
        self.settings = settings
        self.source = source
        self.form = ManifestForm(settings, source)
        self.placeholders = Placeholders(self.form)
        self.outputs = CaptureOutputs(self.form, self.placeholders, writer or default_writer())
        self.is_dead = False
        self._is_shared = is_shared
        self._quota = CaptureQuota(len(settings.windows), settings.max_captures, settings.skip_captures)
        self.form.times_skipped = self._times_skipped
        self._profiler = profiler
        self._lock = threading.Lock()
        self._iterations = 0
        self._furthest = -1
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """1, 2, ...: numbers the loops whose engine gives its requests no names."""
        return next(self._numbers)

    def new_gate(self) -> Gate:
        """A gate for one loop. If there are several, they share what is still wanted."""
        gate = make_gate(
            self.settings.windows,
            track=self.settings.track,
            max_iterations=self.settings.max_iterations,
            max_captures=self.settings.max_captures,
            skip_captures=self.settings.skip_captures,
            armed=self.settings.arm != "request",
            quota=self._quota if self._is_shared else None,
        )
        self._quota = gate.quota
        return gate

    def _times_skipped(self, window: TokenWindow) -> int:
        return self._quota.skipped(self.settings.windows.index(window))

    @property
    def is_waiting(self) -> bool:
        """Whether captures are still wanted."""
        return not self.is_dead and bool(self._quota.wanted)

    def device_profiler(self) -> DeviceProfiler:
        """The device profiler of these windows.

        Raises:
            UnavailableError: the option cannot work on this device.
        """
        if self._profiler is None:
            self.form.device = detect_device(self.settings.device)
            self._profiler = make_profiler(self.settings, self.form.device)
            # torch's profiler knows an Intel GPU, which is no `device` of its own in the settings
            self.form.device = getattr(self._profiler, "device", self.form.device)
        return self._profiler

    # -- what the loops have seen -------------------------------------------------------------------------------------

    def add_loop(self, iterations: int, furthest: int) -> None:
        """A loop has ended. Its iterations and the furthest token that it made count for the windows not reached."""
        with self._lock:
            self._iterations += iterations
            self._furthest = max(self._furthest, furthest)

    @property
    def iterations(self) -> int:
        """Iterations of the loops that have ended."""
        return self._iterations

    @property
    def furthest(self) -> int:
        """Furthest token that they made."""
        return self._furthest


_shared: list[Arming] = []
_lock = threading.Lock()


def shared_arming(settings: Settings, source: Source) -> Arming:
    """What the loops of an engine in the job's own process share, for as long as the settings are in force."""
    with _lock:
        for arming in _shared:
            if arming.source == source and arming.settings == settings:
                return arming
        arming = Arming(settings, source, is_shared=True)
        _shared.append(arming)
        return arming


def forget_armings() -> None:
    """The job has ended: its loops capture nothing more, and those of the next job wait for their windows anew."""
    with _lock:
        for arming in _shared:
            arming.is_dead = True
        _shared.clear()


def end_armings_in_child() -> None:
    """Capture nothing in a fork of a process whose loops have begun to wait: the captures are the parent's.

    A process that is forked before that captures for itself.
    """
    global _lock
    _lock = threading.Lock()  # another thread may have held it
    for arming in _shared:
        arming.is_dead = True
