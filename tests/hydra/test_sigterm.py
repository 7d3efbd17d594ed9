"""SIGTERM: the capture is saved, the process dies of the signal as it would have without us, and a job that handles the
signal itself (or has children that do) is never touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="nobody can send SIGTERM here")

Job = Callable[..., "subprocess.CompletedProcess[str]"]

PRELUDE = """
import array, asyncio, fcntl, hashlib, logging, os, signal, sys, termios, threading, time
from verl_profiler_conf import Settings, activate, decode_loop
from verl_profiler_conf.launch import signal_log, sigterm_watch, termination

sigterm_watch.START_PATIENCE = 0  # who waits for a handler that does not run waits no time
SETTINGS = Settings.from_mapping(
    {"profile_token_start": 2, "profile_token_end": 30, "device": "cpu", "save_path": sys.argv[1]}
)

def wakeup_fd():
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found, warn_on_full_buffer=False)
    return found

def until(condition):
    while not condition():
        time.sleep(0.01)

def until_read():
    waiting = array.array("i", [0])
    def empty():
        fcntl.ioctl(wakeup_fd(), termios.FIONREAD, waiting)
        return waiting[0] == 0
    until(empty)

def until_answered():
    # the watch takes one signal after the other: when it has read this one, it is done with all before
    until_read()
    signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    until_read()
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Run a script in a process of its own: exit code and what it printed."""

    def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PRELUDE + script, str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run


HEALTHY = {
    "own handler": """
signal.signal(signal.SIGTERM, lambda *_: print("saving a checkpoint"))
os.kill(os.getpid(), signal.SIGTERM)
""",
    "own handler, set while ours is waited for": """
signal.signal(signal.SIGTERM, lambda *_: None)
sigterm_watch.end_by_force(termination._in_force)
""",
    "own handler that calls the one before it": """
before = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *frame: before(*frame) if callable(before) else None)
os.kill(os.getpid(), signal.SIGTERM)
""",
    "ignored": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGTERM)
""",
    "child with a handler of its own": """
told, tell = os.pipe()
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
    os.write(tell, b"ready")
    signal.pause()
os.read(told, 5)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
""",
    "child that is ended as soon as it is there": """
child = os.fork()
if child == 0:
    signal.pause()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
""",
    "event loop with a handler of its own": """
async def main():
    came = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, came.set)
    os.kill(os.getpid(), signal.SIGTERM)
    await came.wait()
asyncio.run(main())
""",
}


@pytest.mark.parametrize("what", HEALTHY)
def test_healthy_job_works_on(job: Job, what: str) -> None:
    early = what == "child that is ended as soon as it is there"
    done = job(
        # runs in the child before what we have registered
        (f"os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), {int(signal.SIGTERM)}))\n" if early else "")
        + "job = activate(SETTINGS)\n"
        + HEALTHY[what]
        + "if wakeup_fd() != -1: until_answered()\n"
        + "job.close()\nprint('worked on')\n"
    )
    assert done.returncode == 0, done.stderr
    assert "worked on" in done.stdout
    assert "SIGTERM" not in done.stderr


def test_everything_is_given_back_when_the_job_ends(job: Job) -> None:
    done = job("""
import psutil
def taken():
    return psutil.Process().num_fds(), threading.active_count(), wakeup_fd(), signal.getsignal(signal.SIGTERM)
before = taken()
for _ in range(3):
    with activate(SETTINGS):
        assert (threading.active_count(), wakeup_fd() != -1) == (before[1] + 1, True)
    assert taken() == before, (taken(), before)
""")
    assert done.returncode == 0, done.stderr


def test_event_loops_keep_the_wakeup_descriptor(job: Job) -> None:
    done = job("""
class Ear:
    def __init__(self):
        self.came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self.came.set)
    async def hears(self):
        self.came.clear()
        os.kill(os.getpid(), signal.SIGUSR2)
        await asyncio.wait_for(self.came.wait(), 20)

async def job_within_a_loop():
    ear = Ear()
    with activate(SETTINGS):
        await ear.hears()
    await ear.hears()

async def loop_within_a_job(job):
    ear = Ear()
    await ear.hears()
    job.close()
    await ear.hears()

asyncio.run(job_within_a_loop())
asyncio.run(loop_within_a_job(activate(SETTINGS)))
""")
    assert done.returncode == 0, done.stderr


def test_who_puts_our_descriptor_back_later_harms_nobody(job: Job) -> None:
    done = job("""
import psutil
theirs = os.pipe()
os.set_blocking(theirs[1], False)
open_files = set()
for _ in range(4):  # as trio and uvloop do
    job = activate(SETTINGS)
    ours = signal.set_wakeup_fd(theirs[1])
    job.close()
    assert signal.set_wakeup_fd(ours) == theirs[1]
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.kill(os.getpid(), signal.SIGTERM)  # into a pipe that nobody watches
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    open_files.add(psutil.Process().num_fds())
assert len(open_files) == 1, open_files
with activate(SETTINGS):  # what came before this job is none of its business
    until_answered()
assert (wakeup_fd(), psutil.Process().num_fds()) == (-1, open_files.pop() - 2)
""")
    assert done.returncode == 0, done.stderr


SIGTERM_AT_THE_END = """
sigterm_watch.START_PATIENCE = 60
import verl_profiler_conf.capture.backends.torch_profiler as backend
write = backend.TorchRecording.write

def terminated_before_it_is_written(self, path, renames):
    until(lambda: job._closed)
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)  # our handler has begun
    return write(self, path, renames)

backend.TorchRecording.write = terminated_before_it_is_written
logging.basicConfig(level=logging.INFO)
job = activate(SETTINGS)
with decode_loop(rows=2) as loop:
    for _ in range(5):
        with loop.iteration():
            pass
if sys.argv[2] == "main":
    job.close()
else:
    closing = threading.Thread(target=job.close)
    closing.start()
    closing.join()
print("works on")
"""


@pytest.mark.parametrize("thread", ["main", "another"])
def test_trace_that_the_jobs_end_waits_for_is_not_lost(job: Job, tmp_path: Path, thread: str) -> None:
    pytest.importorskip("torch")
    done = job(SIGTERM_AT_THE_END, thread)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "works on" not in done.stdout
    (manifest,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.manifest.json"))
    assert [row["lo"] for row in manifest["rows"]] == [2, 3, 4]
    assert (tmp_path / manifest["trace"]).stat().st_size == manifest["trace_bytes"] > 0
    line = "captured tokens 2-4 of [2, 30): the response ended after token 4; 3 iterations of loop, rank 0 -> "
    assert done.stderr.count(line) == 1


def test_closing_that_never_ends_is_given_up(job: Job) -> None:
    done = job("""
sigterm_watch.START_PATIENCE, termination.PATIENCE = 60, 0.1
termination.close_on_sigterm(threading.Event().wait)
os.kill(os.getpid(), signal.SIGTERM)
""")
    assert done.returncode == -signal.SIGTERM
    assert "SIGTERM: closing the capture first" in done.stderr
    assert "captures could not be closed" in done.stderr


@pytest.mark.parametrize("log", ["works", "hangs"])
def test_job_that_hangs_in_native_code_is_ended_and_that_is_said(job: Job, log: str) -> None:
    done = job(f"""
signal_log.LOG_PATIENCE_S = 0.1 if {log!r} == "hangs" else 60
activate(SETTINGS)
def terminate():
    until(lambda: sys._current_frames()[main].f_code.co_name == "hang")
    if {log!r} == "hangs":
        logging.lastResort.acquire()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
def hang():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes in C, without Python's lock
main = threading.get_ident()
threading.Thread(target=terminate, daemon=True).start()
hang()
""")
    assert done.returncode == -signal.SIGTERM
    assert ("the main thread has been in native code" in done.stderr) == (log == "works")
