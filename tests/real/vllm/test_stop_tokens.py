"""Requests that end with a stop token, as most do: an engine that schedules ahead learns of it one iteration late."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("no vLLM in this environment", allow_module_level=True)

import vllm_spy
from oracle import Expected, check, expect_lead, read_trace
from vllm_driver import Driver, rest
from workloads import PLAIN

from verl_profiler_conf.capture.session import close_all
from verl_profiler_conf.core.settings import ENV_NAME

pytestmark = pytest.mark.engine_vllm

ENDS = (18, 25, 40, 31)
"""Response length of each request, by its own stop token; the first is the lead."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver(tmp_path_factory.mktemp("models"))
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def responses(driver: Driver) -> list[list[int]]:
    """What the requests would say if nothing stopped them: sampled with a seed each, so the same every time."""
    return [response[:48] for response in rollout(driver, [None] * len(ENDS))]


def rollout(driver: Driver, stops: list[int | None]) -> list[list[int]]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [5 + number, 6, 7, 8]} for number in range(len(stops))]
    params = [
        SamplingParams(
            max_tokens=48,
            ignore_eos=True,
            detokenize=False,
            temperature=1.0,
            seed=number,
            stop_token_ids=None if stop is None else [stop],
        )
        for number, stop in enumerate(stops)
    ]
    llm = driver.llm(PLAIN)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    rest(llm.llm_engine)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("start", "end"),
    [(10, 30), (14, 19), (17, 20), (18, 22), (19, 23), (25, 30), (0, 48)],
    ids=[
        "ends inside",
        "ends one before its end",
        "ends at its start",
        "would open in vain",
        "the lead passes on",
        "and on",
        "all of it",
    ],
)
def test_the_iteration_that_ran_in_vain(
    driver: Driver, responses: list[list[int]], tmp_path: Path, start: int, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = [response[length - 1] for response, length in zip(responses, ENDS, strict=True)]
    folder = tmp_path / "profile"
    raw = {"profile_token_start": start, "profile_token_end": end, "save_path": str(folder), "device": "cpu"}
    monkeypatch.setenv(ENV_NAME, json.dumps(raw))
    monkeypatch.setenv(vllm_spy.ENV, str(tmp_path / "spy.jsonl"))
    from verl_profiler_conf.engines.vllm.plugin import register

    register()
    lengths = [len(response) for response in rollout(driver, stops)]
    close_all()
    assert lengths == [response.index(stop) + 1 for response, stop in zip(responses, stops, strict=True)]
    log = vllm_spy.read_log(tmp_path / "spy.jsonl")
    assert any(not made for it in log[1:] for made in it.made.values()), "iterations ran in vain"

    expected = expect_lead(log, [(start, end)])
    for capture in expected:
        add_what_ran_in_vain(capture, log, end)
    manifests = [json.loads(path.read_text()) for path in folder.glob("*.manifest.json")]
    traces = [m["trace"] for m in manifests if m["trace"]]
    assert len(traces) == len(expected)
    for name, capture in zip(traces, expected, strict=True):
        check(read_trace(folder / name), capture, log)
        (manifest,) = manifests
        assert [row["gap"] for row in manifest["rows"]] == [n in capture.gaps for n in capture.iterations]


def add_what_ran_in_vain(capture: Expected, log: Any, end: int) -> None:
    """A lead that ends inside the window is known to have ended one iteration later: that one is captured, as a gap."""
    after = capture.iterations[-1] + 1
    last = log[capture.iterations[-1]].made[capture.request].stop
    if last < end and after < len(log) and capture.request in log[after].made:
        capture.iterations.append(after)
        capture.gaps.append(after)
