"""verl's own servers and client: the trace of each step holds the tokens of the responses, also of those that reached
the engine in several requests."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("no verl in this environment", allow_module_level=True)

import vllm_spy
from clone import SUPPORT
from oracle import Expected, Iteration, check, expect_lead, read_trace
from real_trainer import ENVIRONMENT, write_inputs
from rollout_server_job import FIRST_TURN, RESPONSE, TOOL

pytestmark = pytest.mark.engine_verl

WINDOW = (60, 70)
RANK = 1
LENGTHS = [[RESPONSE] * 4, [RESPONSE] * 3, [FIRST_TURN, RESPONSE]]
LABELS = [f"step{number}_replica0" for number in (1, 2, 3)]
OVERRIDES = (
    "actor_rollout_ref.rollout.max_model_len=256",
    f"data.max_response_length={RESPONSE}",
    "+profiler=verl_torch_window",
    f"profiler.profile_token_start={WINDOW[0]}",
    f"profiler.profile_token_end={WINDOW[1]}",
)
TWO_RANKS = (
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.max_num_batched_tokens=64",
    f"profiler.ranks=[{RANK}]",
)
SGLANG = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "enable_memory_saver": "false",
    "chunked_prefill_size": 64,
    "max_total_tokens": 4096,
    "sleep_on_idle": "true",
}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="an environment with vLLM")
def test_vllm_on_two_ranks_with_prompts_in_chunks(tmp_path: Path) -> None:
    told = run_job(tmp_path, *TWO_RANKS, spied=True)
    assert [step["lengths"] for step in told] == LENGTHS
    manifests = read_manifests(tmp_path)
    assert [manifest["label"] for manifest in manifests] == LABELS
    assert {manifest["rank"] for manifest in manifests} == {RANK}, "the other rank was not asked for"
    assert [(m["step"], m["replica"], m["global_rank"]) for m in manifests] == [(step, 0, RANK) for step in (1, 2, 3)]
    log = vllm_spy.read_log(tmp_path / "spy.jsonl", pid=manifests[0]["pid"])
    begins = [0, *(step["iterations"] for step in told)]
    chunks, cut, turns = (log[begin:end] for begin, end in itertools.pairwise(begins))
    assert sum(not made for it in chunks for made in it.made.values()) > 3, "prompts were computed in chunks"
    assert any(0 < tokens < WINDOW[0] for tokens in responses(cut).values()), "responses were cut before the window"
    for manifest, step in zip(manifests, (chunks, continued(cut), in_turns(turns)), strict=True):
        (expected,) = expected_of(step)
        rest = [it for it in log if it.number not in range(step[0].number, step[-1].number + 1)]
        check(read_trace(tmp_path / "profile" / manifest["trace"]), expected, [*step, *rest])
        rows = [(row["lo"], row["hi"]) for row in manifest["rows"]]
        assert rows == [(token, token + 1) for token in range(*WINDOW)]


@pytest.mark.by_hand
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="an environment with vLLM")
def test_vllm_with_speculation(tmp_path: Path) -> None:
    """Drafts of n-grams, which verl passes on as they are; its own (MTP) need a model that makes them. Not in the
    trainer: with its top_k vLLM 0.32 fails in an iteration without drafts."""
    drafts = "{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4, prompt_lookup_min: 1}"
    told = run_job(tmp_path, f"+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={drafts}", spied=True)
    assert [step["lengths"] for step in told] == LENGTHS
    manifests = read_manifests(tmp_path)
    assert [manifest["label"] for manifest in manifests] == LABELS
    log = vllm_spy.read_log(tmp_path / "spy.jsonl", pid=manifests[0]["pid"])
    begins = [0, *(step["iterations"] for step in told)]
    first, cut, turns = (log[begin:end] for begin, end in itertools.pairwise(begins))
    assert max(len(made) for it in log for made in it.made.values()) > 1, "drafts were accepted"
    for manifest, step in zip(manifests, (first, continued(cut), in_turns(turns)), strict=True):
        (expected,) = expected_of(step)
        rest = [it for it in log if it.number not in range(step[0].number, step[-1].number + 1)]
        check(read_trace(tmp_path / "profile" / manifest["trace"]), expected, [*step, *rest])


@pytest.mark.by_hand
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="an environment with SGLang")
def test_sglang(tmp_path: Path) -> None:
    """verl's server passes no prefix on to SGLang, and its requests carry what lies behind them in another place."""
    arguments = ", ".join(f"{name}: {value}" for name, value in SGLANG.items())
    engine = f"+actor_rollout_ref.rollout.engine_kwargs.sglang={{{arguments}}}"
    told = run_job(tmp_path, "actor_rollout_ref.rollout.name=sglang", engine)
    assert [step["lengths"] for step in told] == LENGTHS
    manifests = read_manifests(tmp_path)
    assert [manifest["label"] for manifest in manifests] == LABELS
    for manifest, requests in zip(manifests, (4, 3, 1), strict=True):
        rows = [(row["lo"], row["hi"], row["index"], row["requests"]) for row in manifest["rows"]]
        assert [row[:2] for row in rows] == [(token, token + 1) for token in range(*WINDOW)]
        assert {row[3] for row in rows} == {requests}
        trace = read_trace(tmp_path / "profile" / manifest["trace"])
        assert trace.ranges == rows
        assert len(trace.operators) > 10 * len(rows)


def read_manifests(folder: Path) -> list[dict[str, Any]]:
    """In order of their labels."""
    found = [json.loads(path.read_text()) for path in (folder / "profile").glob("*.manifest.json")]
    return sorted(found, key=lambda manifest: manifest["label"])


def expected_of(step: Sequence[Iteration]) -> list[Expected]:
    """What the step has to leave; the oracle numbers the iterations of a log from 0."""
    first = step[0].number
    found = expect_lead([dataclasses.replace(it, number=it.number - first) for it in step], [WINDOW])
    return [dataclasses.replace(one, iterations=[first + number for number in one.iterations]) for one in found]


def run_job(folder: Path, *overrides: str, spied: bool = False) -> list[dict[str, Any]]:
    write_inputs(folder)
    spy = {}
    if spied:
        spy = {"PYTHONPATH": vllm_spy.spy_path(folder / "spy"), vllm_spy.ENV: str(folder / "spy.jsonl")}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray:
        done = subprocess.run(
            [sys.executable, str(SUPPORT / "rollout_server_job.py"), str(folder), *OVERRIDES, *overrides],
            env={
                **os.environ,
                **ENVIRONMENT,
                "RAY_TMPDIR": ray,
                "VLLM_CPU_OMP_THREADS_BIND": "0|1",
                **spy,
            },
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))  # type: ignore[no-any-return]


def responses(log: Sequence[Iteration]) -> dict[str, int]:
    """Request -> tokens that it made, in order of appearance."""
    made: dict[str, int] = {}
    for it in log:
        for request, tokens in it.made.items():
            made[request] = max(made.get(request, 0), tokens.stop)
    return made


def after(log: Sequence[Iteration], before: dict[str, int]) -> list[Iteration]:
    """The log with the tokens of requests counted on from what was before them."""
    return [
        dataclasses.replace(
            it,
            made={
                request: range(tokens.start + before.get(request, 0), tokens.stop + before.get(request, 0))
                for request, tokens in it.made.items()
            },
        )
        for it in log
    ]


def continued(log: Sequence[Iteration]) -> list[Iteration]:
    """Three requests begin the responses, three others end them, and each response is whole."""
    made = responses(log)
    assert len(made) == 6
    before = {request: RESPONSE - tokens for request, tokens in list(made.items())[3:]}
    assert sorted(before.values()) == sorted(list(made.values())[:3])
    return after(log, before)


def in_turns(log: Sequence[Iteration]) -> list[Iteration]:
    _, second = responses(log)
    return after(log, {second: FIRST_TURN + TOOL})
