"""Captures of nodes that share no folder, on a real Ray cluster whose nodes have a disk each: a job without verl."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("no Ray in this environment", allow_module_level=True)

from clone import CLONE, SUPPORT, python_path
from ray_nodes import QUIET, RayNodes, ray_nodes

from verl_profiler_conf.tools import cli

pytestmark = pytest.mark.engine_verl


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """A head and two nodes."""
    common = tmp_path_factory.mktemp("common")
    with ray_nodes(common, {"PYTHONPATH": python_path(CLONE)}, count=2) as made:
        yield made


def start(cluster: RayNodes, folder: Path, **told: Any) -> subprocess.Popen[str]:
    told = {"nodes": [node.address for node in cluster.nodes], **told}
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / "gather_job.py"), str(folder), json.dumps(told)],
        env={**os.environ, **QUIET, "RAY_ADDRESS": cluster.address, "PYTHONPATH": python_path(CLONE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(cluster: RayNodes, folder: Path, **told: Any) -> str:
    """The job's log and output."""
    job = start(cluster, folder, **told)
    out, log = job.communicate(timeout=240)
    assert job.returncode == 0, log[-4000:]
    return out + log


def manifests(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.manifest.json"))]


def disks(cluster: RayNodes, folder: Path) -> list[Path]:
    """The folder on each node's own disk."""
    return [node.disk / folder.relative_to(cluster.common) for node in cluster.nodes]


def test_captures_of_every_node_come_to_the_driver(cluster: RayNodes) -> None:
    folder = cluster.common / "all"
    log = run(cluster, folder)
    assert sorted(manifest["node"] for manifest in manifests(folder)) == [node.address for node in cluster.nodes]
    for disk in disks(cluster, folder):
        (name,) = (path.name for path in disk.glob("*.trace.json.gz"))
        assert (folder / name).read_bytes() == (disk / name).read_bytes()
    assert "brought 2 captures (" in log
    for rank in range(2):  # over all replicas, as the user counts them
        assert log.count(f"tokens [4, 6): 2 iterations of loop, rank {rank} -> ") == 1
    assert "WARNING" not in log
    assert cli.main(["report", str(folder)]) == 0
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_folder_that_nodes_share_is_left_as_it_is(cluster: RayNodes, tmp_path: Path) -> None:
    log = run(cluster, tmp_path / "shared")
    assert "brought" not in log
    assert len(manifests(tmp_path / "shared")) == 2
    assert log.count("tokens [4, 6): 2 iterations of loop") == 2


def test_never_brings_nothing(cluster: RayNodes) -> None:
    folder = cluster.common / "never"
    log = run(cluster, folder, settings={"gather": "never"})
    assert "no engine reported an iteration" in log
    assert not folder.exists() or not list(folder.iterdir())


def test_beyond_the_limit_only_manifests_come(cluster: RayNodes) -> None:
    folder = cluster.common / "limit"
    sizes = "1KiB"
    log = run(cluster, folder, settings={"gather_limit": sizes})
    assert not list(folder.glob("*.trace.json.gz"))
    for node, disk, manifest in zip(cluster.nodes, disks(cluster, folder), by_node(folder), strict=True):
        (trace,) = disk.glob("*.trace.json.gz")
        assert manifest["left_at"] == f"{node.address}:{folder / trace.name}"
        assert f"it lies in {manifest['left_at']}" in log
    assert cli.main(["report", str(folder)]) == 0


def by_node(folder: Path) -> list[dict[str, Any]]:
    return sorted(manifests(folder), key=lambda manifest: str(manifest["node"]))


def test_an_app_that_ends_ray_itself(cluster: RayNodes) -> None:
    folder = cluster.common / "shutdown"
    log = run(cluster, folder, then="shutdown")
    assert len(list(folder.glob("*.trace.json.gz"))) == 2
    assert log.count("tokens [4, 6): 2 iterations of loop") == 2


def test_as_it_happens(cluster: RayNodes) -> None:
    """A job that knows what it asks for does not wait for its end."""
    folder = cluster.common / "while"
    log = run(cluster, folder, then="wait", every=0.2, asked=True)
    assert "here while it runs" in log
    assert len(list(folder.glob("*.trace.json.gz"))) == 2
    assert log.count("tokens [4, 6): 2 iterations of loop") == 2, "one line each"
    assert f"2 captures in {folder}" in log
    assert "WARNING" not in log


@pytest.mark.parametrize("asked", [True, False])
def test_a_node_that_dies_before_the_end(asked: bool, cluster: RayNodes, tmp_path: Path) -> None:
    folder = cluster.common / f"dies{asked}"
    here = len(cluster.nodes)
    node = cluster.add()
    job = start(cluster, folder, then=str(tmp_path / "end"), **({"asked": True} if asked else {}))
    assert job.stdout is not None
    assert job.stdout.readline() == "captured\n"
    node.kill()
    (tmp_path / "end").touch()
    _, log = job.communicate(timeout=300)
    assert job.returncode == 0, log[-4000:]
    cluster.nodes.pop()
    assert sorted(manifest["node"] for manifest in manifests(folder)) == [each.address for each in cluster.nodes]
    if asked:
        assert (
            f"WARNING verl_profiler_conf.launch.summary: {here} of {here + 1} captures that were asked for are" in log
        )
        assert f"rank {here} (replica {here}): tokens [4, 6) not reported: node {node.address} " in log
    else:
        assert f"WARNING verl_profiler_conf.launch.summary: node {node.address} " in log
