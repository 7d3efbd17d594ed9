"""`verl-profiler doctor --ray` on a real cluster: each node that would capture nothing is told, with what to do."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("no Ray in this environment", allow_module_level=True)

from clone import CLONE
from ray_nodes import RayNodes, ray_nodes
from waiting import wait_until

from verl_profiler_conf.core.install import NAME, pip_install
from verl_profiler_conf.tools import cli
from verl_profiler_conf.tools.finding import Finding
from verl_profiler_conf.tools.ray_checks import ray_findings

pytestmark = pytest.mark.engine_verl

OWN = version(NAME)
SITE = Path(sysconfig.get_path("purelib"))


def site_with(folder: Path, other_version: str | None) -> dict[Path, Path]:
    """A mount: this environment's packages with this one in another version, or without it."""
    shutil.copytree(SITE, folder, symlinks=True)
    for path in folder.glob("*verl_profiler_conf*"):
        if path.suffix != ".dist-info":
            path.unlink()
        elif other_version is None:
            shutil.rmtree(path)
        else:
            text = (path / "METADATA").read_text().replace(f"Version: {OWN}\n", f"Version: {other_version}\n")
            (path / "METADATA").write_text(text)
            path.rename(path.with_name(f"verl_profiler_conf-{other_version}.dist-info"))
    return {SITE: folder}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """A head, and three nodes, each with something wrong."""
    with ray_nodes(tmp_path_factory.mktemp("common"), {"PYTHONPATH": ""}, count=0) as made:
        folder = tmp_path_factory.mktemp("sites")
        made.add(mounts=site_with(folder / "without", None))
        made.add(mounts=site_with(folder / "older", "0.0.1"))
        made.add(environment={"VLLM_PLUGINS": "another"})
        yield made


@pytest.fixture(autouse=True)
def _away_from_the_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's workers look for packages where the driver does, and a clone that was installed has metadata in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path or ".").resolve() != CLONE])


def by_node(address: str) -> dict[str, list[Finding]]:
    told: dict[str, list[Finding]] = {}
    for finding in ray_findings(address):
        told.setdefault(finding.about.removeprefix("Ray node "), []).append(finding)
    return told


def test_each_node_tells_what_is_wrong_with_it(cluster: RayNodes) -> None:
    told = by_node(cluster.address)
    without, older, blocked = (told.pop(node.address) for node in cluster.nodes)
    fix = f"on that node: {pip_install(version=OWN)}"
    assert [(each.state, each.text, each.fix) for each in without] == [("error", f"{NAME} is not installed", fix)]
    assert [(each.state, each.text, each.fix) for each in older] == [("error", f"{NAME} 0.0.1, and {OWN} here", fix)]
    assert [(each.state, each.text) for each in blocked] == [
        ("ok", f"{NAME} {OWN}"),
        ("error", "VLLM_PLUGINS=another keeps the hook out"),
    ]
    assert blocked[1].fix == "add verl_profiler_conf to it, or unset it, before ray start"
    ((head,),) = told.values()
    assert (head.state, head.text) == ("ok", f"{NAME} {OWN}")


def test_the_command(cluster: RayNodes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert cli.main(["doctor", "--ray", cluster.address]) == 1
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"error Ray node {cluster.nodes[0].address} {NAME} is not installed" in said
    assert said.count(f"-> on that node: {pip_install(version=OWN)}") == 2


def test_a_node_that_has_died(cluster: RayNodes) -> None:
    node = cluster.add()
    assert [finding.state for finding in by_node(cluster.address)[node.address]] == ["ok"]
    node.kill()
    cluster.nodes.remove(node)
    (told,) = wait_until(
        lambda: [each for each in by_node(cluster.address)[node.address] if each.text.startswith("is dead")],
        "Ray to notice that a node has died",
    )
    assert told.state == "warning"
    assert told.fix.startswith("start Ray there again")


def test_no_cluster() -> None:
    (told,) = ray_findings("127.0.0.9:1")
    assert (told.about, told.state, told.text) == ("Ray", "error", "127.0.0.9:1: nothing answers there")
    assert told.fix == "start the cluster, or name its address"
