"""Has the device profiler get ready a few iterations before a window opens."""

from __future__ import annotations

import time

from verl_profiler_conf.capture import torch_state
from verl_profiler_conf.capture.arming import Arming
from verl_profiler_conf.capture.backends import DeviceProfiler
from verl_profiler_conf.capture.interruptions import signals_held_back
from verl_profiler_conf.capture.recorder import Loop, recorder


class Preparation:
    """Prepares the device profiler for the next capture of one loop, and undoes it if that capture does not come.

    Args:
        arming: whose device profiler it is.
        loop: in whose name the recorder is leased.
    """

    def __init__(self, arming: Arming, loop: Loop) -> None:
        self._arming = arming
        self._loop = loop
        self._is_prepared = False
        """Whether the device profiler is prepared for a capture of this loop that has not begun yet."""
        self._stall_ns = 0
        """How long the rollout waited for the preparation."""

    def prepare(self) -> None:
        """Have the device profiler get ready, unless another loop records with it."""
        if not recorder.lease(self._loop):
            return
        started_ns = time.perf_counter_ns()
        try:
            profiler = self._arming.device_profiler()
            if busy_with(profiler) is None:  # preparing a profiler breaks one that runs
                with signals_held_back(), torch_state.own_profiler():
                    profiler.prepare()
                self._is_prepared = True
        finally:
            recorder.give_back(self._loop)
            self._stall_ns += time.perf_counter_ns() - started_ns

    def use(self) -> int:
        """A capture has begun: what was prepared is in use. Returns how long the rollout waited for it, in ns."""
        self._is_prepared = False
        stall_ns, self._stall_ns = self._stall_ns, 0
        return stall_ns

    def undo(self) -> None:
        """The capture does not begin for now."""
        if not self._is_prepared:
            return
        self._is_prepared, self._stall_ns = False, 0
        if recorder.lease(self._loop):
            try:
                with signals_held_back(), torch_state.own_profiler():
                    self._arming.device_profiler().discard()
            finally:
                recorder.give_back(self._loop)


def busy_with(profiler: DeviceProfiler) -> str | None:
    """Why nothing can be recorded now, or None."""
    busy = profiler.busy()
    if busy is None and profiler.name == "torch":
        busy = torch_state.other_profiler_prepared()
    return busy
