"""Real SGLang, what the common workloads leave out: its own calls, its server, its end, overlapped speculation."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("no SGLang in this environment", allow_module_level=True)

import requests
from oracle import check, expect_lead, read_trace
from packaging.version import Version
from sglang_driver import CLOSE, ENVIRONMENT, Driver, options
from sglang_spy import spy_path, wait_until_idle
from waiting import wait_until
from workloads import Build, Workload, window

pytestmark = pytest.mark.engine_sglang

PROMPTS = [[5 + n, 17, 250 - n, 3 * n + 9] * 4 for n in range(4)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver(tmp_path_factory.mktemp("models"))
    yield driver
    driver.close()


def generate(engine: Any, tokens: int = 16, **sampling: Any) -> list[list[int]]:
    asked = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **sampling}
    return [output["output_ids"] for output in engine.generate(input_ids=PROMPTS, sampling_params=asked)]


def manifests(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "profile").glob("*.manifest.json"))]


def captured(folder: Path) -> list[list[int]]:
    """First tokens of the captured iterations, of each capture that has a trace."""
    return [[row["lo"] for row in manifest["rows"]] for manifest in manifests(folder) if manifest["trace"]]


@pytest.mark.every_version
def test_profile_calls_drive_the_gate_whenever_they_come(driver: Driver, tmp_path: Path) -> None:
    engine, spied = driver.begin(Build(), tmp_path, window(4, 8, arm="request"))
    ran = 0

    def round_trip(tokens: int = 16) -> None:
        nonlocal ran
        generate(engine, tokens)
        ran = wait_until_idle(spied, beyond=ran)

    engine.stop_profile()  # nothing is under way
    round_trip()
    assert captured(tmp_path) == []
    engine.start_profile(start_step=3, num_steps=1)  # ours are the settings
    engine.start_profile()
    round_trip()  # the window closes by itself
    engine.stop_profile()
    engine.stop_profile()
    round_trip()
    engine.collective_rpc(CLOSE)
    assert captured(tmp_path) == [[4, 5, 6, 7]]

    engine.start_profile()
    round_trip(tokens=3)  # too short for the window
    engine.stop_profile()
    round_trip()  # disarmed: what was waited for does not fire later
    assert captured(tmp_path) == [[4, 5, 6, 7]]
    assert [manifest["furthest_token"] for manifest in manifests(tmp_path) if not manifest["trace"]] == [2]


@pytest.mark.every_version
def test_window_that_ends_with_its_requests_waits_for_nobody(driver: Driver, tmp_path: Path) -> None:
    engine, _ = driver.begin(Build(), tmp_path, window(4, None))
    generate(engine, 10)
    assert wait_until(lambda: captured(tmp_path), "a capture") == [list(range(4, 10))]
    assert [manifest["closed_by"] for manifest in manifests(tmp_path)] == ["request_end"]


def test_own_profiler_is_left_alone_when_the_job_arms(driver: Driver, tmp_path: Path) -> None:
    engine, spied = driver.begin(Build(), tmp_path, window(4, 8))
    own = tmp_path / "own"
    engine.start_profile(output_dir=str(own), activities=["CPU"], with_stack=False)
    generate(engine)
    engine.stop_profile()
    assert list(own.glob("*.trace.json.gz"))
    assert captured(tmp_path) == []
    assert ["reached, but not captured" in note for m in manifests(tmp_path) for note in m["notes"]] == [True]
    with pytest.raises(RuntimeError, match="not in progress"):
        engine.stop_profile()  # SGLang's own answer
    wait_until_idle(spied)


def test_request_that_stops_right_before_the_window_opens_nothing(driver: Driver, tmp_path: Path) -> None:
    engine, _ = driver.begin(Build(), tmp_path / "learn", window(0, 1))
    first = generate(engine)[0]
    index = next(i for i in range(1, 16) if first[i] not in first[:i])
    engine, spied = driver.begin(Build(), tmp_path, window(index + 1, index + 2))
    sampling = {"max_new_tokens": 16, "temperature": 0, "stop_token_ids": [first[index]]}
    output = engine.generate(input_ids=[PROMPTS[0]], sampling_params=[sampling], rid=["lead"])
    assert len(output[0]["output_ids"]) == index + 1
    wait_until_idle(spied)
    assert captured(tmp_path) == []
    assert [manifest["furthest_token"] for manifest in manifests(tmp_path)] == [index]


@pytest.mark.every_version
def test_shutdown_leaves_the_trace_of_a_window_that_is_open(driver: Driver, tmp_path: Path) -> None:
    engine, _ = driver.begin(Build(), tmp_path, window(4, None))
    generate(engine)
    driver.close()
    assert captured(tmp_path) == [list(range(4, 16))]
    assert [manifest["closed_by"] for manifest in manifests(tmp_path)] in (["request_end"], ["job_end"])


@pytest.mark.skipif(Version(version("sglang")) < Version("0.5.23"), reason="this release drafts on CUDA only")
def test_overlapped_speculation(driver: Driver, tmp_path: Path) -> None:
    workload = Workload(
        "ngram_overlap",
        window(10, 20),
        prompts=(16,) * 4,
        responses=(30, 9, 24, 40),
        build=Build(overlap=True, speculation="ngram"),
        repetitive=True,
    )
    run = driver.run(workload, tmp_path)
    assert sorted(run.responses) == [9, 24, 30, 40]
    lengths = {len(made) for it in run.log for made in it.made.values()}
    assert max(lengths) > 1, "drafts were accepted"
    (expected,) = expect_lead(run.log, [(10, 20)])
    (trace,) = (read_trace(path) for path in run.folder.glob("*.pt.trace.json.gz"))
    check(trace, expected, run.log)


# -- the server ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A free port with a free one 10,000 above it: SGLang 0.5.12 takes that for gRPC, so it must be a port too."""
    for port in range(20000, 32000):  # below what Linux gives out by itself
        with contextlib.suppress(OSError), socket.socket() as found, socket.socket() as second:
            found.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 10000))
            return port
    raise AssertionError("no free port")


def answers(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-3000:]
    try:
        return requests.get(f"{url}/health_generate", timeout=30).ok
    except requests.RequestException:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("server")
    settings = {"save_path": str(folder / "profile"), "device": "cpu", **window(0, 3, max_captures=2)}
    port = free_port()
    arguments = []
    for name, value in {**options(Build(), folder), "log_level": "info"}.items():
        flag = f"--{name.replace('_', '-')}"
        arguments += [flag] if value is True else [] if value is False else [flag, str(value)]
    environment = {**os.environ, **ENVIRONMENT, "VERL_PROFILER_CONF": json.dumps(settings)}
    environment["PYTHONPATH"] = spy_path(folder / "spy")
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), *arguments]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(process, url, folder / "log"), "the server is up", seconds=240)
        yield url, folder
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.mark.every_version
def test_server_counts_neither_its_warm_up_nor_health_checks(server: tuple[str, Path]) -> None:
    url, folder = server
    assert manifests(folder) == []
    for name in ("first", "second"):
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": PROMPTS[0], "sampling_params": sampling, "rid": name}
        assert requests.post(f"{url}/generate", json=body, timeout=120).ok
        assert requests.get(f"{url}/health_generate", timeout=60).ok
    wait_until(lambda: len(manifests(folder)) >= 2, "two manifests")
    assert captured(folder) == [[0, 1, 2]] * 2
    assert [manifest["tracked"] for manifest in manifests(folder)] == [["first"], ["second"]]
    text = (folder / "log").read_text()
    assert text.count("armed: rank 0 of sglang waits for response tokens [0, 3); captures go to ") == 1
    wait_until(
        lambda: (folder / "log").read_text().count("tokens [0, 3): 3 iterations of sglang, rank 0 -> ") == 2,
        "two lines",
    )
    assert all((folder / "profile" / manifest["trace"]).stat().st_size for manifest in manifests(folder))
