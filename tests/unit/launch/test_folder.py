"""Where captures go, made sure of before the job starts."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_profiler_conf import ConfigError, Settings, activate
from verl_profiler_conf.capture.manifest import Manifest, write_manifest
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.core.urls import is_url, local_path
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.launch.folder import write_problem
from verl_profiler_conf.launch.remote import RemoteFolder
from verl_profiler_conf.schema.options import TorchWindow

WINDOW = TokenWindow(20, 24)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ENV_NAME, raising=False)
    monkeypatch.chdir(tmp_path)


def config(save_path: str, **fields: Any) -> Any:
    node = OmegaConf.structured(TorchWindow(save_path=save_path, profile_token_end=8, **fields))
    return OmegaConf.create({"train": {"prof": node}})


@pytest.mark.parametrize(
    ("text", "remote"),
    [
        ("s3://bucket/x", True),
        ("hdfs://name:9000/x", True),
        ("simplecache::s3://bucket/x", True),
        ("file:///x", False),
        ("/x", False),
        ("x/y", False),
        ("C:/x", False),
        ("a:b", False),
    ],
)
def test_what_is_a_url(text: str, remote: bool) -> None:
    assert is_url(text) is remote
    assert local_path("file:///x/y") == "/x/y"


def test_a_file_url_is_a_local_folder(tmp_path: Path) -> None:
    with activate(config(f"file://{tmp_path}/traces")) as job:
        assert job.settings is not None
        assert job.settings.save_path == str(tmp_path / "traces")
    with pytest.raises(ConfigError, match=r"^train\.prof\.save_path='file://x/y': must have an absolute path"):
        activate(config("file://x/y"))


@pytest.mark.parametrize(
    "path", ["{folder}/file/x", "/dev/null/x", "/proc/x", "{folder}/" + "n" * 300, "{folder}/a\0b"]
)
def test_a_folder_that_cannot_be_written_stops_the_job_before_it_starts(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^train\.prof\.save_path=.*cannot be written: ") as refused:
        activate(config(path.replace("{folder}", str(tmp_path))))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "new\nline", "no utf8 \udcff", "%2"])
def test_odd_names_that_the_disk_takes_are_taken(name: str, tmp_path: Path) -> None:
    assert write_problem(tmp_path / name) is None


def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    assert write_problem(tmp_path / "a" / "b", keep=False) is None
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_is_written_nothing_is_checked(tmp_path: Path) -> None:
    with activate(config("/dev/null/x", mapping="iterations")):
        pass
    with activate(config("/dev/null/x", enable=False)) as job:
        assert job.settings is None


def test_in_a_ray_job_that_gathers_nothing_other_machines_may_have_the_folder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    with pytest.raises(ConfigError, match="cannot be written"):
        activate(config("/dev/null/x"))
    with activate(config("/dev/null/x", gather="never")):
        pass
    assert "cannot be written on this machine: Not a directory; engines elsewhere may" in caplog.text


def test_settings_that_do_not_fit_into_the_environment_are_refused() -> None:
    windows = [[2 * i, 2 * i + 1] for i in range(9500)]
    cfg = OmegaConf.create({"prof": OmegaConf.structured(TorchWindow(profile_token_windows=windows))})
    with pytest.raises(ConfigError, match=r"^prof\.profile_token_windows='9500 windows': too many"):
        activate(cfg)
    assert activate(Settings(windows=tuple(TokenWindow(2 * i, 2 * i + 1) for i in range(1000)))).close() is None


def test_a_folder_that_is_lost_later_is_what_the_summary_blames(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with activate(config(str(tmp_path / "traces"))):
        (tmp_path / "traces").rmdir()
        (tmp_path / "traces").touch()
    (line,) = [record.getMessage() for record in caplog.records if "no capture" in record.getMessage()]
    assert "traces cannot be written: " in line
    assert "no engine" not in line


# -- at a URL ----------------------------------------------------------------------------------------------------------


def capture(folder: Path, name: str, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    manifest = Manifest(WINDOW, "vllm", "0.32.0", 0, "lead", run_id="job", trace=f"{name}.gz", **more)
    (folder / f"{name}.gz").write_bytes(b"trace of " + name.encode())
    return write_manifest(manifest, folder / name)


def test_without_fsspec_a_url_is_refused_and_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError) as refused:
        activate(config("s3://bucket/prof"))
    assert str(refused.value) == (
        "train.prof.save_path='s3://bucket/prof': needs fsspec: pip install '<wheel or clone of verl-profiler-conf>"
        "[remote]'; or name a local folder"
    )
    assert not Path("s3:").exists()


def test_a_scheme_without_its_package_and_one_that_is_none() -> None:
    pytest.importorskip("fsspec")
    if "s3fs" not in sys.modules:
        with pytest.raises(ConfigError, match="needs a package for this kind of URL: Install s3fs"):
            activate(config("s3://bucket/prof"))
    with pytest.raises(ConfigError, match="is no URL that fsspec knows"):
        activate(config("nosuch://bucket/prof"))


def test_a_url_in_the_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^VERL_PROFILER_CONF\.save_path='s3://b/x': must be a local folder"):
        Settings.from_json('{"save_path": "s3://b/x"}')


def test_a_url_that_cannot_be_written_stops_the_job(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^train\.prof\.save_path='local://.*: cannot be written: "):
        activate(config(f"local://{tmp_path}/file/x"))


def test_captures_are_moved_at_the_jobs_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("fsspec")
    caplog.set_level(logging.INFO)
    there = tmp_path / "bucket"
    with activate(config(f"local://{there}"), run_dir=tmp_path / "run") as job:
        assert job.settings is not None
        assert job.settings.save_path == str(tmp_path / "run" / "profile")
        path = capture(tmp_path / "run" / "profile", "x")
        manifest = Manifest.from_json(path.read_bytes())
        manifest.run_id = job.settings.run_id
        write_manifest(manifest, path.with_name("x"), replace=True)
    assert sorted(p.name for p in there.iterdir()) == ["x.gz", "x.manifest.json"]
    assert (there / "x.gz").read_bytes() == b"trace of x"
    assert not (tmp_path / "run" / "profile").exists()
    assert f"moved 1 captures to local://{there}" in caplog.text


def test_captures_of_other_jobs_stay(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    capture(tmp_path / "here", "x")
    RemoteFolder(f"local://{tmp_path}/there").move_all(tmp_path / "here", "another")
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == ["x.gz", "x.manifest.json"]


def test_a_directory_is_moved_whole(tmp_path: Path) -> None:
    """As the trace of Ascend's profiler is."""
    pytest.importorskip("fsspec")
    path = capture(tmp_path / "here", "x")
    (tmp_path / "here" / "x.gz").unlink()
    (tmp_path / "here" / "x.gz" / "sub").mkdir(parents=True)
    (tmp_path / "here" / "x.gz" / "sub" / "data").write_bytes(b"raw")
    urls = RemoteFolder(f"local://{tmp_path}/there").move_all(path.parent, "job")
    assert urls == {"x.gz": f"local://{tmp_path}/there/x.gz"}
    assert (tmp_path / "there" / "x.gz" / "sub" / "data").read_bytes() == b"raw"
    assert not [p for p in (tmp_path / "there").iterdir() if p.name.startswith(".")]


def test_nothing_older_is_replaced(tmp_path: Path) -> None:
    """Two machines may well make the same names."""
    pytest.importorskip("fsspec")
    there = tmp_path / "there"
    there.mkdir()
    (there / "x.gz").write_bytes(b"older")
    capture(tmp_path / "here", "x")
    urls = RemoteFolder(f"local://{there}").move_all(tmp_path / "here", "job")
    assert (there / "x.gz").read_bytes() == b"older"
    assert Path(urls["x.gz"].removeprefix("local://")).read_bytes() == b"trace of x"


def test_a_move_that_fails_half_way_leaves_all_here_and_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("fsspec")
    capture(tmp_path / "here", "x")
    remote = RemoteFolder(f"local://{tmp_path}/there")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the network is down")

    monkeypatch.setattr(remote._fs, "mv", fail)
    assert remote.move_all(tmp_path / "here", "job") == {}
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == ["x.gz", "x.manifest.json"]
    assert list((tmp_path / "there").iterdir()) == []
    assert "1 of 1 captures could not be moved to" in caplog.text
    assert "the network is down" in caplog.text
