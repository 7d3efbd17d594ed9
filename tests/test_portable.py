"""The package on a system without POSIX, where Python has no fork and no signal masks: emulated by taking them away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Windows lacks these in Python 3.10; modules that are POSIX's alone cannot be imported there
SCRIPT = """
import asyncio, concurrent.futures, importlib, logging, multiprocessing, pkgutil, random, subprocess, sys, tempfile
import os, signal
import hydra, rich.console, wrapt

for name in ("register_at_fork", "fork", "forkpty", "set_blocking", "mkfifo", "getuid", "geteuid", "getpgid", "killpg",
             "uname", "getloadavg", "sched_getaffinity", "sched_setaffinity", "statvfs", "fchmod", "fchown", "chown",
             "setsid", "nice", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "WNOHANG"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGALRM", "SIGCHLD", "pthread_sigmask",
             "pthread_kill", "setitimer", "alarm", "pause", "sigwait", "SIG_BLOCK", "SIG_SETMASK"):
    if hasattr(signal, name):
        delattr(signal, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios", "syslog"):
    sys.modules[name] = None
"""

IMPORTS = """
import verl_profiler_conf, hydra_plugins.verl_profiler_conf
names = [found.name for found in pkgutil.walk_packages(verl_profiler_conf.__path__, "verl_profiler_conf.")]
assert len(names) > 50
for name in names:
    if not name.endswith(".__main__"):
        importlib.import_module(name)
"""

JOB = """
from verl_profiler_conf import Settings, activate, decode_loop
fields = {"profile_token_start": 2, "profile_token_end": 30, "device": "cpu", "save_path": sys.argv[1]}
with activate(Settings.from_mapping(fields)):
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    with decode_loop(rows=1) as loop:
        with loop.iteration():
            pass
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


@pytest.mark.parametrize("what", [IMPORTS, JOB], ids=["every module is imported", "a job runs"])
def test_without_posix(what: str, tmp_path: Path) -> None:
    env = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "1"}  # else numpy, built for Linux, asks os.uname for the kernel
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + what, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
