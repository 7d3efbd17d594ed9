"""A Ray cluster of several nodes on this machine, each with a disk of its own at one path.

Each node but the head runs in a mount namespace of its own, in which a folder of the node's stands at that path: what
its processes write there, the others do not see. Nodes have addresses of their own on the loopback network.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]


@dataclass
class RayNode:
    """One node: its address, the folder that stands at the common path, its processes."""

    address: str
    disk: Path
    process: Any

    def kill(self) -> None:
        """As a machine that loses its power."""
        ended = [self.process]
        with contextlib.suppress(psutil.NoSuchProcess):
            ended = [*self.process.children(recursive=True), self.process]
        for one in ended:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(ended, timeout=20)


@dataclass
class RayNodes:
    """The cluster.

    Attributes:
        address: for `ray.init` and RAY_ADDRESS.
        common: the path that is another disk on each node; the head's is the machine's own.
        nodes: but the head.
    """

    address: str
    common: Path
    temporary: Path
    environment: Mapping[str, str]
    nodes: list[RayNode] = field(default_factory=list)
    _made: int = 0

    def add(
        self,
        *,
        gpus: int = 1,
        cpus: int = 2,
        mounts: Mapping[Path, Path] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> RayNode:
        """One more node, which is there when this returns.

        Args:
            gpus: that it says it has.
            cpus: the same.
            mounts: path -> the folder that stands there for this node's processes, beside the disk of its own.
            environment: variables of its processes, beside those of the cluster.
        """
        number = self._made + 2
        self._made += 1
        disk = self.temporary / f"disk{number}"
        disk.mkdir()
        address = f"127.0.0.{number}"
        pairs = {self.common: disk, **(mounts or {})}
        mounting = " && ".join(shlex.join(["mount", "--bind", str(source), str(at)]) for at, source in pairs.items())
        command = [*UNSHARE, "sh", "-c", f'{mounting} && exec "$@"', "sh", *_ray_start()]
        command += [f"--address={self.address}", f"--node-ip-address={address}", "--block"]
        command += [f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
        log = self.temporary / f"node{number}.log"
        process = _start(command, log, {**self.environment, **(environment or {})})
        node = RayNode(address, disk, process)
        self.nodes.append(node)
        _wait_for("Ray runtime started", log, process)
        return node


@contextlib.contextmanager
def ray_nodes(common: Path, environment: Mapping[str, str], *, count: int, cpus: int = 2) -> Iterator[RayNodes]:
    """A head without a GPU and `count` nodes with one each; `common` is another disk on each."""
    if subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode:
        reason = "mount namespaces are not allowed here"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    common.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie in it
    log = temporary / "head.log"
    command = [*_ray_start(), "--head", "--block", f"--temp-dir={temporary}", "--port=0"]
    command += [f"--ray-client-server-port={_free_port()}"]
    command += ["--include-dashboard=false", f"--num-cpus={cpus}", "--num-gpus=0"]
    head = _start(command, log, environment)
    try:
        address = _wait_for(r"--address='([^']+)'", log, head)
        cluster = RayNodes(address, common, temporary, environment)
        for _ in range(count):
            cluster.add(cpus=cpus)
        yield cluster
    finally:
        for node in cluster.nodes if "cluster" in locals() else ():
            node.kill()
        RayNode("", common, head).kill()
        shutil.rmtree(temporary, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _ray_start() -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts", "start"]


def _start(command: list[str], log: Path, environment: Mapping[str, str]) -> Any:
    with log.open("w") as said:
        return psutil.Popen(command, env={**os.environ, **QUIET, **environment}, stdout=said, stderr=subprocess.STDOUT)


def _wait_for(pattern: str, log: Path, process: Any) -> str:
    end = time.monotonic() + 180
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(pattern, log.read_text()):
            return found[found.lastindex or 0]
        time.sleep(0.2)
    raise AssertionError(log.read_text())
