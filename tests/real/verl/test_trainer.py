"""The real `verl.trainer.main_ppo` under Ray, with the preset and without: what it leaves, and that it trains alike."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("verl") is None or importlib.util.find_spec("vllm") is None:
    pytest.skip("no verl with vLLM in this environment", allow_module_level=True)

import vllm_spy
from oracle import Iteration, check, expect_lead, read_trace
from real_trainer import CUT, PROMPT, STEPS, TWO_REPLICAS, Training, cluster, train, write_inputs

from verl_profiler_conf.tools import cli

pytestmark = [pytest.mark.engine_verl, pytest.mark.timeout(1200)]  # a training is made within the first test's time

WINDOW = (20, 30)
PRESET = ("+profiler=verl_torch_window", "profiler.profile_token_start=20", "profiler.profile_token_end=30")
REPLICAS = (0, 1)
BOTH = "profiler.ranks=[0,1]"
"""Of the trainer: the GPU of each replica."""
SPY = f"+ray_kwargs.ray_init.runtime_env.env_vars.{vllm_spy.ENV}"
"""Of the launch's own, beside the preset's."""

UNLIKE = ("timing", "perf/", "actor/perf/")
"""Metrics that differ between any two runs."""

ROLLED_OUT = ("training/rollout_", "rollout_corr/")
"""Metrics of the engine's probabilities, whose last digits depend on which requests it happened to batch."""


@dataclass
class Run:
    """A training and its folder."""

    training: Training
    folder: Path

    @property
    def captures(self) -> dict[str, dict[str, Any]]:
        """Label -> manifest."""
        found = [json.loads(path.read_text()) for path in (self.folder / "hydra" / "profile").glob("*.manifest.json")]
        by_label = {manifest["label"]: manifest for manifest in found}
        assert len(by_label) == len(found), "one of each"
        return by_label

    def steps(self, pid: int) -> list[list[Iteration]]:
        """The iterations of each RL step, of one replica. All prompts of a step are equally long, no two steps' are."""
        path = self.folder / "spy.jsonl"
        prompts = vllm_spy.read_prompts(path)
        log = vllm_spy.read_log(path, pid)
        return [list(step) for _, step in groupby(log, lambda it: {prompts[request] for request in it.made})]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster that is there before the launch: its processes do not inherit the launch's environment."""
    with cluster({"PYTHONPATH": vllm_spy.spy_path(tmp_path_factory.mktemp("spy"))}, gpus=len(REPLICAS)) as address:
        yield address


@pytest.fixture(scope="module")
def with_preset(inputs: Path, running: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("preset")
    changes = {**TWO_REPLICAS, SPY: folder / "spy.jsonl"}
    return Run(train(folder, inputs, *PRESET, BOTH, "profiler.steps=[1,3,4]", changes=changes, cluster=running), folder)


@pytest.fixture(scope="module")
def without(inputs: Path, running: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("plain")
    return Run(train(folder, inputs, changes=TWO_REPLICAS, cluster=running), folder)


def check_steps(run: Run, *numbers: int) -> None:
    """Steps with these numbers have a capture of each replica, of exactly the window's tokens of its lead, and no other
    has."""
    captured = {label: manifest for label, manifest in run.captures.items() if manifest["trace"]}
    assert sorted(captured) == sorted(f"step{number}_replica{replica}" for number in numbers for replica in REPLICAS)
    assert len({manifest["pid"] for manifest in captured.values()}) == len(REPLICAS)
    for label, manifest in captured.items():
        assert f"_{label}_" in manifest["trace"]
        assert label == f"step{manifest['step']}_replica{manifest['replica']}"
        steps = run.steps(manifest["pid"])
        assert len(steps) == STEPS
        (expected,) = expect_lead(steps[manifest["step"] - 1], [WINDOW])
        assert len(expected.iterations) == 10
        whole = [it for step in steps for it in step]
        check(read_trace(run.folder / "hydra" / "profile" / manifest["trace"]), expected, whole)
    traces = [path.name for path in (run.folder / "hydra" / "profile").glob("*.trace.*")]
    assert sorted(traces) == sorted(manifest["trace"] for manifest in captured.values())


def check_trained_the_same(run: Run, plain: Run) -> None:
    assert list(run.training.metrics) == list(plain.training.metrics) == list(range(1, STEPS + 1))
    for step, expected in plain.training.metrics.items():
        assert float(expected["actor/grad_norm"]) > 0, "something was learned"
        assert {"actor/pg_loss", "actor/entropy", "critic/rewards/mean", "critic/advantages/mean"} <= set(expected)
        found = run.training.metrics[step]
        assert set(found) == set(expected)
        for name, value in expected.items():
            if name.startswith(ROLLED_OUT):
                assert float(found[name]) == pytest.approx(float(value), rel=1e-3, abs=1e-3, nan_ok=True), name
            elif not name.startswith(UNLIKE):
                assert found[name] == value, (step, name)


def test_steps_that_were_asked_for_leave_their_tokens(with_preset: Run) -> None:
    check_steps(with_preset, 1, 3)


def test_a_step_of_short_responses_leaves_word_and_one_warning(with_preset: Run) -> None:
    assert with_preset.training.metrics[4]["response_length/max"] == str(float(CUT))
    for replica in REPLICAS:
        short = with_preset.captures[f"step4_replica{replica}"]
        assert (short["trace"], short["furthest_token"]) == (None, CUT - 1)
    count, warning = with_preset.training.said_by_us()
    assert count.endswith("4 of 6 captures that were asked for are there")
    assert "step 4, ranks 0, 1 (replicas 0, 1): tokens [20, 30) were never reached in" in warning
    assert warning.endswith(f"furthest response token seen is {CUT - 1}")


def test_each_capture_has_a_line_in_the_log(with_preset: Run) -> None:
    lines = [line for line in with_preset.training.said_by_us("INFO") if "10 iterations of vllm, rank" in line]
    expected = [f"step{step}_replica{replica}: tokens [20, 30): 10" for step in (1, 3) for replica in REPLICAS]
    assert [one for one in expected if sum(one in line for line in lines) == 1] == expected
    assert len(lines) == len(expected)


def test_it_trains_as_without(with_preset: Run, without: Run) -> None:
    check_trained_the_same(with_preset, without)
    assert not list(without.folder.rglob("*.manifest.json"))
    assert not without.training.said_by_us()
    assert not without.training.said_by_us("INFO")


def test_the_report(with_preset: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(with_preset.folder / "hydra")
    assert cli.main(["report", folder]) == 1  # step 4 has not reached its window
    shown = capsys.readouterr().out
    assert "tokens 20-29" in shown
    assert "never reached" in shown
    assert cli.main(["report", folder, "--json"]) == 1
    manifests = [each["manifest"] for each in json.loads(capsys.readouterr().out)["captures"]]
    captured = [
        (manifest["step"], manifest["replica"], manifest["closed_by"]) for manifest in manifests if manifest["rows"]
    ]
    assert sorted(captured) == [(step, replica, "window") for step in (1, 3) for replica in REPLICAS]


@pytest.mark.by_hand
def test_a_cluster_of_its_own(inputs: Path, without: Run, tmp_path: Path) -> None:
    """As most launches are; everything inherits the environment."""
    environment = {
        "PYTHONPATH": vllm_spy.spy_path(tmp_path / "spy"),
        vllm_spy.ENV: str(tmp_path / "spy.jsonl"),
    }
    preset = (*PRESET, BOTH, "profiler.steps=[1,3]")
    run = Run(train(tmp_path, inputs, *preset, changes=TWO_REPLICAS, environment=environment), tmp_path)
    check_steps(run, 1, 3)
    check_trained_the_same(run, without)
    assert not run.training.said_by_us()


@pytest.mark.by_hand
def test_responses_that_are_all_shorter(inputs: Path, tmp_path: Path) -> None:
    changes = {"data.max_response_length": 15, "actor_rollout_ref.rollout.max_model_len": PROMPT + 15}
    run = Run(train(tmp_path, inputs, *PRESET, "profiler.steps=[1,3]", changes=changes), tmp_path)
    assert {manifest["trace"] for manifest in run.captures.values()} == {None}
    count, *warnings = run.training.said_by_us()
    assert count.endswith("0 of 2 captures that were asked for are there")
    said = [
        f"step {step}, rank 0 (replica 0): tokens [20, 30) were never reached" in line
        for step, line in zip((1, 3), warnings, strict=True)
    ]
    assert said == [True, True]
    assert list(run.training.metrics) == list(range(1, STEPS + 1))


@pytest.mark.by_hand
def test_two_ranks_with_prompts_in_chunks(inputs: Path, tmp_path: Path) -> None:
    """Both capture, and agree."""
    environment = {
        "PYTHONPATH": vllm_spy.spy_path(tmp_path / "spy"),
        vllm_spy.ENV: str(tmp_path / "spy.jsonl"),
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }
    changes = {
        **TWO_REPLICAS,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.rollout.max_num_batched_tokens": 16,
    }
    preset = (*PRESET, "profiler.steps=[2]", "profiler.all_ranks=true")
    train(tmp_path, inputs, *preset, changes=changes, environment=environment)
    found = [json.loads(path.read_text()) for path in (tmp_path / "hydra" / "profile").glob("*.manifest.json")]
    found.sort(key=lambda manifest: manifest["rank"])
    assert [(manifest["rank"], manifest["label"]) for manifest in found] == [
        (0, "step2_replica0"),
        (1, "step2_replica0"),
    ]
    rows = [[(row["index"], row["lo"], row["hi"], row["request"]) for row in manifest["rows"]] for manifest in found]
    assert rows[0] == rows[1]
    assert [row[1] for row in rows[0]] == list(range(*WINDOW))
