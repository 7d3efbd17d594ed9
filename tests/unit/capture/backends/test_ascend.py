"""The Ascend profiler, without an NPU: on the real Python layer of torch_npu releases, their native layer faked.

The releases are fetched once into the user's cache; no NPU, no CANN, no device data are involved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clone import CLONE, SUPPORT, python_path
from released import released_or_skip

from verl_profiler_conf.capture.backends.ascend import AscendProfiler, _supported_options
from verl_profiler_conf.core.errors import UnavailableError

RELEASES = ("2.6.0", "2.13.0")
"""The oldest and the newest set of names that a rollout is likely to meet."""


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> Path:
    pytest.importorskip("torch")
    return released_or_skip("torch_npu", request.param, "*.py")


def run(release: Path, out: Path, scenario: str, **options: object) -> dict[str, Any]:
    """What a scenario of `npu_without_native.py` saw."""
    script = SUPPORT / "npu_without_native.py"
    command = [sys.executable, str(script), str(release), scenario, str(out), json.dumps(options)]
    env = {**os.environ, "PYTHONPATH": python_path(CLONE)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=out)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen | {"out": out}


@pytest.fixture(scope="module")
def plain(release: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A capture with default settings."""
    return run(release, tmp_path_factory.mktemp("plain"), "capture")


@pytest.mark.slow
class TestOnRealPythonLayersWithoutAnNpu:
    def test_a_capture_is_started_stopped_and_finished_once(self, plain: dict[str, Any]) -> None:
        seen = plain
        native = [name for name in seen["calls"] if name in NATIVE]
        assert native == [
            "_init_profiler",
            "_warmup_profiler",
            "_start_profiler",
            "iteration",
            "_stop_profiler",
            "_finalize_profiler",
            "written",
        ]
        assert seen["calls"].index("synchronize") < seen["calls"].index("_start_profiler")
        assert "synchronize" in seen["calls"][seen["calls"].index("iteration") : seen["calls"].index("_stop_profiler")]

    def test_nothing_is_called_incomplete(self, release: Path, tmp_path: Path) -> None:
        said = run(release, tmp_path, "capture", contents=["cpu", "npu", "shapes"], level="level1")["said"]
        assert "incomplete" not in said
        assert "Incorrect schedule" not in said
        assert "reset" not in said

    def test_the_directory_bears_our_name_and_is_whole(self, plain: dict[str, Any]) -> None:
        seen = plain
        assert seen["path"] == str(seen["out"] / "stem_ascend_pt")
        assert seen["left"] == ["stem_ascend_pt"]
        assert seen["hidden while it records"]
        assert any(name.startswith("profiler_info") for name in seen["files"])
        assert seen["bytes"] > len(b"kernels")
        assert seen["events"] is None

    def test_how_to_analyse_it_is_said(self, plain: dict[str, Any]) -> None:
        assert f"analyse(profiler_path='{plain['out'] / 'stem_ascend_pt'}')" in plain["note"]

    def test_busy_before_and_after(self, plain: dict[str, Any]) -> None:
        seen = plain
        assert (seen["busy before"], seen["busy after"]) == (None, None)

    @pytest.mark.parametrize(
        ("options", "config"),
        [
            ({"contents": ["npu"]}, {"activities": ["NPU"]}),
            ({"contents": ["cpu", "shapes", "memory"]}, {"activities": ["CPU"], "shapes": True, "memory": True}),
            ({"contents": ["stack", "module"]}, {"activities": ["CPU", "NPU"], "stack": True, "modules": True}),
        ],
    )
    def test_contents(self, release: Path, tmp_path: Path, options: dict[str, Any], config: dict[str, Any]) -> None:
        found = run(release, tmp_path, "capture", **options)["config"]
        assert {key: found[key] for key in config} == config

    def test_without_contents_both_activities_and_nothing_more(self, plain: dict[str, Any]) -> None:
        config = plain["config"]
        assert config["activities"] == ["CPU", "NPU"]
        assert not any(config[name] for name in ("shapes", "memory", "stack", "modules"))

    def test_levels_differ_and_metrics_come_with_the_first(self, release: Path, tmp_path: Path) -> None:
        found = {}
        for level in ("level_none", "level0", "level2"):
            out = tmp_path / level
            out.mkdir()
            found[level] = run(release, out, "capture", level=level)["config"]
        assert len({config["level"] for config in found.values()}) == 3
        assert found["level0"]["metrics"] == found["level_none"]["metrics"] != found["level2"]["metrics"]

    def test_no_device_data_is_said(self, release: Path, tmp_path: Path) -> None:
        seen = run(release, tmp_path, "without_device_data")
        assert seen["events"] == 0
        assert "no device data was recorded" in seen["note"]

    def test_twice_and_discarded(self, release: Path, tmp_path: Path) -> None:
        assert run(release, tmp_path, "twice")["left"] == ["first_ascend_pt", "second_ascend_pt"]

    def test_never_over_an_older_one(self, release: Path, tmp_path: Path) -> None:
        seen = run(release, tmp_path, "over_an_older_one")
        assert seen["refused"]
        assert seen["left"] == ["stem_ascend_pt/old"]

    @pytest.mark.parametrize("name", ["_ExperimentalConfig", "ProfPathCreator", "is_prof_inited"])
    def test_a_private_part_of_torch_npu_is_missing(self, name: str, release: Path, tmp_path: Path) -> None:
        seen = run(release, tmp_path, "without", name=name)
        assert seen["busy before"] is None
        assert seen["left"] == ["stem_ascend_pt"]

    def test_prepared_ahead(self, release: Path, tmp_path: Path) -> None:
        seen = run(release, tmp_path, "prepared_ahead")
        native = [name for name in seen["wanted"] if name in NATIVE or name.startswith("iteration")]
        assert native == [
            "_init_profiler",
            "_warmup_profiler",
            "iteration ahead",
            "_start_profiler",
            "iteration",
            "_stop_profiler",
            "_finalize_profiler",
        ]
        assert (seen["busy while prepared"], seen["busy after"]) == (None, None)
        assert seen["left"] == ["stem_ascend_pt"]
        assert "Incorrect schedule" not in seen["said"]

    def test_the_engines_own_profiler_writes_where_it_did(self, release: Path, tmp_path: Path) -> None:
        seen = run(release, tmp_path, "path_of_another")
        assert len(seen["engine"]) == 1
        assert seen["engine"][0].startswith("worker_")
        assert seen["ours"] == ["stem_ascend_pt"]

    def test_another_profiler(self, release: Path, tmp_path: Path) -> None:
        seen = run(release, tmp_path, "beside_another")
        assert "another torch_npu profiler" in seen["during"]
        assert seen["after"] is None

    def test_under_msprof_it_says_that_it_did_not_start(self, release: Path, tmp_path: Path) -> None:
        seen = run(release, tmp_path, "under_msprof")
        if "skip" in seen:
            pytest.skip(seen["skip"])
        assert "did not start" in seen["error"]
        assert "msprof" in seen["error"]
        assert seen["left"] == []


NATIVE = {
    "_init_profiler",
    "_warmup_profiler",
    "_start_profiler",
    "iteration",
    "_stop_profiler",
    "_finalize_profiler",
    "written",
}


def test_without_torch_npu() -> None:
    with pytest.raises(UnavailableError, match="torch_npu cannot be imported"):
        AscendProfiler()


def test_what_a_release_lacks_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    def old(*, level: int) -> None: ...

    assert _supported_options(old, {"level": 1, "mstx": True, "host_sys": None}) == {"level": 1}
    assert "has no mstx:" in caplog.text
