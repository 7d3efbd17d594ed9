"""Limits how much raw JSON of this process waits to be packed.

Packing takes longer than exporting, so the parts of a long window would fill a disk. While too much waits, the thread
that exports the next part stands still until the writer has caught up, for a bounded time.
"""

from __future__ import annotations

import logging
import os
import threading

from verl_profiler_conf.capture.backends.engine_idle import engine_stands_still
from verl_profiler_conf.core.logs import warn_once

log = logging.getLogger(__name__)

LIMIT = 2 << 30
"""Bytes. About four parts of 256 iterations with 2,000 kernels each."""

PATIENCE_S = 30.0
"""Seconds that an export waits at most. vLLM gives a worker's step 300 seconds, and so does SGLang's watchdog."""


class Backlog:
    """Raw traces that are exported and not packed, in a file or in memory."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        # an RLock: the garbage collector may remove a lost trace while this thread holds it
        self._changed = threading.Condition(threading.RLock())
        self._bytes: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        """How many bytes wait now."""
        with self._changed:
            return sum(tuple(self._bytes.values()))

    def add(self, name: str, size: int) -> None:
        """A raw trace has been exported."""
        with self._changed:
            self._bytes[name] = size

    def remove(self, name: str) -> None:
        """A raw trace is packed or dropped. Harmless when it was never added."""
        with self._changed:
            self._bytes.pop(name, None)
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when there is room for one more raw trace, or after `PATIENCE_S`. The thread that packs must not call
        it."""
        if self.bytes < LIMIT:
            return
        # The engine's thread waits here, so an export that waits for an idle engine need not wait any longer.
        with engine_stands_still(), self._changed:
            has_room = self._changed.wait_for(lambda: self.bytes < LIMIT, PATIENCE_S)
        if not has_room:
            warn_once(
                log,
                f"{self.bytes / (1 << 30):.1f} GiB of raw traces wait to be compressed, because the disk or the CPU "
                "does not keep up with this window; a shorter window, or fewer contents, needs less room",
            )


backlog = Backlog()
"""The backlog of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=backlog._reset)  # its parent packs what waits
