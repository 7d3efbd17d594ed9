"""What happens to a rollout: within the forward that makes token `AT`, or prepared before the engine is made."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import when_logged

AT = 6
"""Token whose forward it happens in: in the middle of the window [4, 10)."""
MANIFEST_BYTES = 20_000


# -- what happens within a forward -------------------------------------------------------------------------------------


def raise_error() -> None:
    raise LookupError("the job's own error")


def fork(how: str) -> None:
    pid = os.fork()
    if pid == 0:
        if how == "works":
            import torch

            torch.ones(4, 4) @ torch.ones(4, 4)
        sys.exit(7)
    print("child:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def keep_process_groups() -> None:
    """Let no process group of torch come to its end: that joins a thread, which a fork does not have, and crashes."""
    from torch.distributed import distributed_c10d

    for group in distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def lose_folder(replace: bool) -> None:
    if "VERL_PROFILER_CONF" in os.environ:
        folder = Path(json.loads(os.environ["VERL_PROFILER_CONF"])["save_path"])
        shutil.rmtree(folder, ignore_errors=True)
        if replace:
            folder.write_text("a file")


def fill_disk() -> None:
    """No file grows beyond what a manifest needs, and the disk says that it is full."""
    raw_trace = sys.modules.get("verl_profiler_conf.capture.backends.raw_trace")
    if raw_trace is not None:
        raw_trace.has_room.__globals__["ROOM"] = 1 << 62
    resource.setrlimit(resource.RLIMIT_FSIZE, (MANIFEST_BYTES, resource.RLIM_INFINITY))


def take_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def record_itself() -> None:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        torch.ones(4, 4) @ torch.ones(4, 4)
    print("own profiler:", any(event.name == "aten::mm" for event in own.events()), flush=True)


def emit_ranges() -> None:
    import torch

    with contextlib.suppress(RuntimeError), torch.autograd.profiler.emit_itt():  # not in every build
        torch.ones(4, 4) @ torch.ones(4, 4)


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


WITHIN: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "raise": raise_error,
    "exit": lambda: sys.exit(7),
    "os_exit": lambda: os._exit(9),
    "kill": send(signal.SIGKILL),
    "hang_up": send(signal.SIGHUP),
    "quit": send(signal.SIGQUIT),
    "user_signal": send(signal.SIGUSR1),
    "terminate": send(signal.SIGTERM),
    "interrupt": send(signal.SIGINT),
    "fork": lambda: fork("exits"),
    "fork_that_works": lambda: fork("works"),
    "folder_is_gone": lambda: lose_folder(replace=False),
    "file_in_place_of_folder": lambda: lose_folder(replace=True),
    "no_room": fill_disk,
    "no_room_for_a_while": fill_disk,
    "no_descriptors": take_descriptors,
    "no_descriptors_for_a_while": take_descriptors,
    "own_profiler": record_itself,
    "itt": emit_ranges,
}


def at_the_token(fault: str) -> Callable[[], None]:
    """To be called in each forward: lets the fault happen in one of them."""
    made = 0

    def within() -> None:
        nonlocal made
        made += 1
        if made == AT + 1:
            WITHIN.get(fault, WITHIN["nothing"])()

    return within


# -- what is prepared --------------------------------------------------------------------------------------------------


def never_return(*_: Any) -> None:
    """In native code, without Python's lock, for ever."""
    pipe = Path(os.environ["FAULT_PIPE"])
    os.mkfifo(pipe)
    os.open(pipe, os.O_RDONLY)


listening = contextlib.ExitStack()
failed = threading.Event()
"""A trace could not be written."""


def export_never_ends(*, interrupted: bool) -> None:
    from verl_profiler_conf.capture.backends.unlocked import NativeResult
    from verl_profiler_conf.capture.writer import Writer

    NativeResult.save = never_return  # type: ignore[method-assign]
    Writer.finish_or_give_up.__defaults__ = (0.1, 600.0 if interrupted else 0.5)
    if interrupted:
        listening.enter_context(when_logged("still being written", send(signal.SIGINT)))


def terminated_while_it_is_written() -> None:
    from verl_profiler_conf.capture.backends.torch_recording import TorchRecording
    from verl_profiler_conf.launch import job

    write = TorchRecording.write
    ending = threading.Event()
    mark = job.Job._mark_closed

    def marked(self: Any) -> None:
        mark(self)
        ending.set()

    def written(self: Any, *args: Any) -> Any:
        assert ending.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # until it is answered
            threading.Event().wait(0.01)
        return write(self, *args)

    job.Job._mark_closed, TorchRecording.write = marked, written  # type: ignore[method-assign]


def torch_without_kineto() -> None:
    import torch

    torch.profiler.kineto_available = lambda: False


def torch_raises(name: str, *, late: bool) -> None:
    """Once."""
    import torch

    plain = getattr(torch.profiler.profile, name)

    def failing(self: Any) -> None:
        setattr(torch.profiler.profile, name, plain)
        if late:
            plain(self)
        raise RuntimeError("injected")

    setattr(torch.profiler.profile, name, failing)


PREPARED: dict[str, Callable[[], None]] = {
    "export_never_ends": lambda: export_never_ends(interrupted=False),
    "export_is_interrupted": lambda: export_never_ends(interrupted=True),
    "terminated_while_it_is_written": terminated_while_it_is_written,
    "no_kineto": torch_without_kineto,
    "start_raises_late": lambda: torch_raises("start_trace", late=True),
    "stop_raises": lambda: torch_raises("stop_trace", late=False),
}
