"""The state of torch's own profiler: turns it off where it must be off, and notices when other code prepares one.

Private parts of torch are used here: `_profiler_enabled`, `_disable_profiler`, `_clear_callbacks`, and the three
functions by which every profiler of torch's Python API begins and ends. Without one of them only what depends on it
does not work.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from verl_profiler_conf.capture.backends import pending

log = logging.getLogger(__name__)

_BEGINNINGS = ("_prepare_profiler", "_enable_profiler")
_END = "_disable_profiler"
_MARK = "_verl_profiler_conf"

_own = threading.local()
_prepared = False
_before_others: list[Callable[[], None]] = []


def turn_off() -> None:
    """End torch's profiler on this thread, whatever state a failure left it in. Its events are lost."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    with contextlib.suppress(AttributeError), own_profiler():
        if torch._C._autograd._profiler_enabled():
            with contextlib.suppress(RuntimeError):
                torch.autograd._disable_profiler()
        torch.autograd.profiler._is_profiler_enabled = False


def turn_off_in_child(device: str) -> None:
    """End in a forked child what its parent records. The parent's recording goes on.

    Args:
        device: of the recording. A child must not use its parent's accelerator, so there only the host side is ended.
    """
    if device == "cpu":
        turn_off()
        return
    torch = sys.modules.get("torch")
    with contextlib.suppress(AttributeError):
        torch._C._autograd._clear_callbacks()  # type: ignore[union-attr]
        torch.autograd.profiler._is_profiler_enabled = False  # type: ignore[union-attr]


@contextlib.contextmanager
def own_profiler() -> Iterator[None]:
    """What begins or ends on this thread in the body is the package's own profiler."""
    before = getattr(_own, "is_ours", False)
    _own.is_ours = True
    try:
        yield
    finally:
        _own.is_ours = before


def other_profiler_prepared() -> str | None:
    """Say that other code has prepared a profiler that is not yet running, or None."""
    return "another torch profiler is prepared in this process" if _prepared else None


def call_before_other_profilers(step_aside: Callable[[], None]) -> None:
    """Call `step_aside` on the thread of any other code that prepares or starts a torch profiler, before it does.

    Kineto serves one profiler at a time: the second one breaks the first, and both traces are wrong.
    """
    if step_aside not in _before_others:
        _before_others.append(step_aside)
    module = sys.modules.get("torch.autograd.profiler")
    for name in (*_BEGINNINGS, _END):
        original = getattr(module, name, None)
        if original is not None and not hasattr(original, _MARK):
            setattr(module, name, _watched(name, original))


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        global _prepared
        if getattr(_own, "is_ours", False):
            return original(*args, **kwargs)
        if name not in _BEGINNINGS:
            _prepared = False
            return original(*args, **kwargs)
        _step_aside()
        result = original(*args, **kwargs)
        _prepared = True  # not if that has failed
        return result

    setattr(watched, _MARK, True)
    return watched


def _step_aside() -> None:
    for step_aside in _before_others:
        try:
            step_aside()
        except Exception:  # the other profiler belongs to the job, and has to start all the same
            log.warning("a capture could not make way for another profiler", exc_info=True)
    pending.export_all()  # also what has just ended: the next profiler replaces what converts its device times
