"""verl's own vLLM server and client, with two tensor parallel ranks and chunked prefill: the trace of each step holds
the tokens of the responses, also of those that reached the engine in several requests."""

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

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("no verl in this environment", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
sys.path.insert(0, str(Path(__file__).parent))

import vllm_spy
from oracle import Iteration, check, expect_lead, read_trace
from real_trainer import ENVIRONMENT, write_inputs
from rollout_server_job import FIRST_TURN, RESPONSE, TOOL

pytestmark = pytest.mark.engine_verl

WINDOW = (60, 70)
RANK = 1
OVERRIDES = (
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.max_num_batched_tokens=64",
    "actor_rollout_ref.rollout.max_model_len=256",
    f"data.max_response_length={RESPONSE}",
    "+profiler=verl_torch_window",
    f"profiler.profile_token_start={WINDOW[0]}",
    f"profiler.profile_token_end={WINDOW[1]}",
    f"profiler.ranks=[{RANK}]",
)


def test_each_step_leaves_the_tokens_of_a_response(tmp_path: Path) -> None:
    told = run_job(tmp_path)
    assert [step["lengths"] for step in told] == [[RESPONSE] * 4, [RESPONSE] * 3, [FIRST_TURN, RESPONSE]]
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "profile").glob("*.manifest.json")]
    manifests.sort(key=lambda manifest: manifest["label"])
    assert [manifest["label"] for manifest in manifests] == [f"step{n}_replica0" for n in (1, 2, 3)]
    assert {manifest["rank"] for manifest in manifests} == {RANK}, "the other rank was not asked for"
    log = vllm_spy.read_log(tmp_path / "spy.jsonl", pid=manifests[0]["pid"])
    begins = [0, *(step["iterations"] for step in told)]
    chunks, cut, turns = (log[begin:end] for begin, end in itertools.pairwise(begins))
    assert sum(not made for it in chunks for made in it.made.values()) > 3, "prompts were computed in chunks"
    assert any(0 < tokens < WINDOW[0] for tokens in responses(cut).values()), "responses were cut before the window"
    for manifest, step in zip(manifests, (chunks, continued(cut), in_turns(turns)), strict=True):
        (expected,) = expect_lead(step, [WINDOW])
        rest = [it for it in log if it.number not in range(step[0].number, step[-1].number + 1)]
        check(read_trace(tmp_path / "profile" / manifest["trace"]), expected, [*step, *rest])
        rows = [(row["lo"], row["hi"]) for row in manifest["rows"]]
        assert rows == [(token, token + 1) for token in range(*WINDOW)]


def run_job(folder: Path) -> list[dict[str, object]]:
    (folder / "spy").mkdir()
    write_inputs(folder)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "rollout_server_job.py"), str(folder), *OVERRIDES],
            env={
                **os.environ,
                **ENVIRONMENT,
                "RAY_TMPDIR": ray,
                "VLLM_CPU_OMP_THREADS_BIND": "0|1",
                "PYTHONPATH": vllm_spy.spy_path(folder / "spy"),
                vllm_spy.ENV: str(folder / "spy.jsonl"),
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
