"""What each rollout server tells its engine: its place, and its own share of the window."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from verl_profiler_conf.capture.manifest import gather
from verl_profiler_conf.capture.opening import open_session
from verl_profiler_conf.capture.session import close_all
from verl_profiler_conf.core.place import PLACE_NAME, Place, label_of
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.verl.hooks.replica import share_of
from verl_profiler_conf.verl.hooks.server import hook_server

REQUEST = Settings(windows=(TokenWindow(20, 30),), arm="request", ranks=(0, 1))
NEWEST = Version("0.9.1")


def share(replica: int, ranks: list[int], *, version: Version = NEWEST, **more: Any) -> tuple[bool, tuple[int, ...]]:
    profiler = SimpleNamespace(enable=True, all_ranks=False, ranks=ranks)
    made = share_of(Place(replica, replica * 2), 2, more.get("settings", REQUEST), profiler, version)
    return made.enable, made.ranks if made.enable else ()


@pytest.mark.parametrize(
    ("version", "ranks", "shares"),
    [
        # of GPUs 0 and 3, two a replica, each replica has one
        ("0.9.1", [0, 3], [(True, (0,)), (True, (1,)), (False, ())]),
        # before 0.9.1 verl's ranks are replicas, and the driver has published ranks within them
        ("0.9.0", [0, 2], [(True, (0, 1)), (False, ()), (True, (0, 1))]),
    ],
)
def test_a_replica_has_its_own_ranks_only(
    version: str, ranks: list[int], shares: list[tuple[bool, tuple[int, ...]]]
) -> None:
    assert [share(replica, ranks, version=Version(version)) for replica in range(3)] == shares


@pytest.mark.parametrize("arm", ["job", "request"])
def test_a_window_of_a_generic_option_is_left_alone(arm: str) -> None:
    settings = Settings(windows=REQUEST.windows, arm=arm)
    off = SimpleNamespace(enable=False, all_ranks=False, ranks=[])
    assert share_of(Place(1, 2), 2, settings, off, NEWEST) == settings


@pytest.mark.parametrize(("arm", "enable"), [("job", True), ("request", False)])
def test_an_engine_without_a_profiler_is_never_started_by_request(arm: str, enable: bool) -> None:
    settings = Settings(windows=REQUEST.windows, arm=arm)
    assert share_of(Place(1, 2), 2, settings, None, NEWEST).enable is enable


class Server:
    """Stands for verl's: what it has when it launches its engine."""

    def __init__(self, replica: int, ranks: list[int]) -> None:
        self.replica_rank = replica
        self.config = SimpleNamespace(
            tensor_model_parallel_size=2,
            data_parallel_size=1,
            pipeline_model_parallel_size=1,
            profiler=SimpleNamespace(enable=True, all_ranks=False, ranks=ranks),
        )
        self.launched = False

    async def launch_server(self) -> None:
        self.launched = True

    async def start_profile(self) -> None: ...


def launch(server: Any) -> None:
    kind = type("Launched", (type(server),), {"launch_server": Server.launch_server})
    kind.start_profile = Server.start_profile
    hook_server("Launched", "engine")(SimpleNamespace(Launched=kind))
    server.__class__ = kind
    asyncio.run(server.launch_server())


@pytest.fixture(autouse=True)
def _published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLACE_NAME, "")
    monkeypatch.setenv(ENV_NAME, Settings(**{**vars(REQUEST), "save_path": str(tmp_path), "run_id": "r"}).to_json())


def test_the_engines_processes_inherit_it() -> None:
    server = Server(1, [3])
    launch(server)
    assert server.launched
    assert Place.from_json(os.environ[PLACE_NAME]) == Place(1, 2, None)
    assert json.loads(os.environ[ENV_NAME])["ranks"] == [1]


def test_a_manifest_says_its_place(tmp_path: Path) -> None:
    launch(Server(1, [3]))
    session = open_session(Settings.from_json(os.environ[ENV_NAME]), engine="vllm", version="1", rank=1)
    assert session is not None
    session.start(label_of(4, 1))
    session.begin({"a": range(1)})
    session.end()
    close_all()
    (manifest,) = gather(tmp_path, "r")
    assert (manifest.step, manifest.replica, manifest.rank, manifest.global_rank) == (4, 1, 1, 3)


def test_a_replica_that_nobody_asked_leaves_nothing(tmp_path: Path) -> None:
    launch(Server(0, [3]))
    for rank in range(2):
        assert open_session(Settings.from_json(os.environ[ENV_NAME]), engine="vllm", version="1", rank=rank) is None
    assert not list(tmp_path.iterdir())


def test_a_server_that_is_not_understood_launches_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(1, [3])
    del server.config.profiler
    before = os.environ[ENV_NAME]
    launch(server)
    assert server.launched
    assert os.environ[ENV_NAME] == before
    assert "captures do not bear the replica: AttributeError" in caplog.text
