"""A decode loop with torch's profiler to which something happens; run as a script, with a window in the environment."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.profiler

from verl_profiler_conf import decode_loop

x = torch.ones(8, 8)


def loop(tokens: int, at: Callable[[int], None] = lambda _: None) -> None:
    with decode_loop(rows=1) as rollout:
        for token in range(tokens):
            with rollout.iteration():
                x @ x
                at(token)


def report() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50_000):
        x @ x
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    print("on:", torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)
    print("grew:", grown > 16)


def start_raises_late() -> None:
    plain = torch.profiler.profile.start_trace

    def begin_and_raise(self: Any) -> None:
        plain(self)
        raise RuntimeError("injected")

    torch.profiler.profile.start_trace = begin_and_raise  # type: ignore[method-assign]
    loop(6)
    report()


def stop_raises(before: bool) -> None:
    plain = torch.profiler.profile.stop_trace

    def fail(self: Any) -> None:
        if not before:
            plain(self)
        raise RuntimeError("injected")

    torch.profiler.profile.stop_trace = fail  # type: ignore[method-assign]
    loop(6)
    report()


def interrupt(function: str) -> None:
    """Ctrl-C arrives within torch's own C++ call."""
    module: Any = torch.autograd.profiler
    plain = getattr(module, function)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        setattr(module, function, plain)
        os.kill(os.getpid(), signal.SIGINT)
        return result

    setattr(module, function, interrupted)
    try:
        loop(6)
    except KeyboardInterrupt:
        print("interrupted")
    report()


def fork(how: str) -> None:
    def at(token: int) -> None:
        if token != 3:
            return
        pid = os.fork()
        if pid == 0:
            if how == "work":
                report()
                sys.stdout.flush()
            if how == "profile":
                with torch.profiler.profile() as own:
                    x @ x
                print("own:", any(event.name == "aten::mm" for event in own.events()), flush=True)
            if how == "loop":
                loop(8)
            sys.exit(7)
        print("child:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    loop(6, at)
    report()


def fork_after() -> None:
    """A child that is forked after the capture ends in the ordinary way too."""
    loop(6)
    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    print("child:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def end_while_a_thread_is_inside(how: str) -> None:
    """The job ends, or gets a signal, while another thread is in its window."""
    inside, go_on = threading.Event(), threading.Event()

    def at(token: int) -> None:
        if token == 3:
            inside.set()
            go_on.wait(60)

    if how == "sigterm":
        from verl_profiler_conf import Settings, activate

        activate(Settings.from_json(os.environ["VERL_PROFILER_CONF"]))
    thread = threading.Thread(target=loop, args=(40, at), daemon=True)
    thread.start()
    inside.wait(60)
    threading.Timer(0.2, go_on.set).start()
    if how == "close":
        from verl_profiler_conf.capture.session import close_all

        close_all()
        print("closed")
    else:
        os.kill(os.getpid(), signal.SIGTERM)
    thread.join()
    report()


def exits_inside() -> None:
    """The main thread leaves through sys.exit while it is in its window."""
    loop(6, lambda token: sys.exit(7) if token == 3 else None)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    {
        "start_raises_late": start_raises_late,
        "stop_raises_before": lambda: stop_raises(before=True),
        "stop_raises_after": lambda: stop_raises(before=False),
        "interrupt": interrupt,
        "fork": fork,
        "fork_after": fork_after,
        "end_while_a_thread_is_inside": end_while_a_thread_is_inside,
        "exits_inside": exits_inside,
    }[name](*arguments)
