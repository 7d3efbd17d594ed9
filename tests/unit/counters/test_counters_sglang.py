"""SGLang's own scheduler methods, driven forward by forward, against the counters computed for them."""

from __future__ import annotations

import ast
import gc
import os
import time
from collections.abc import Callable
from enum import Enum
from importlib.metadata import version as distribution_version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from own_sources import method, own_class, own_source

from verl_profiler_conf import TokenWindow, build_sglang_profiler_args
from verl_profiler_conf.core.iterations import captured_iterations, plan

STEPS = 24
MANAGERS = "sglang/srt/managers/"
SCHEDULER = MANAGERS + "scheduler.py"
MIXIN = MANAGERS + "scheduler_profiler_mixin.py"
MANAGER = MANAGERS + "scheduler_components/profiler_manager.py"

MIXIN_METHODS = ("profile", "init_profile", "start_profile", "stop_profile", "_profile_batch_predicate")
MANAGER_METHODS = ("_profile", "_init_profile", "_start_profile", "_stop_profile", "_profile_batch_predicate")
MERGE = ("_merge_profile_traces",)

NOT_INSTALLED = {
    "0.4.6": (SCHEDULER, "Scheduler", ("profile", "start_profile", "stop_profile")),
    "0.4.9": (SCHEDULER, "Scheduler", MIXIN_METHODS),
    "0.4.9.post2": (SCHEDULER, "Scheduler", MIXIN_METHODS),
    "0.5.3": (MIXIN, "SchedulerProfilerMixin", MIXIN_METHODS),
    "0.5.12": (MIXIN, "SchedulerProfilerMixin", MIXIN_METHODS + MERGE),
    "0.5.15": (MANAGER, "SchedulerProfilerManager", MANAGER_METHODS + MERGE),
    "0.5.16": (MANAGER, "SchedulerProfilerManager", MANAGER_METHODS + MERGE),
}


class RequestType(Enum):
    START_PROFILE = 1
    STOP_PROFILE = 2


class FakeDevice:
    """Stands for torch.profiler: whether anything would be recorded is all that counts here."""

    def __init__(self) -> None:
        self.running = 0
        self.torch = MagicMock()
        self.torch.profiler.profile.side_effect = self._make

    def _make(self, **_: Any) -> MagicMock:
        profiler = MagicMock()
        profiler.start.side_effect = lambda: setattr(self, "running", self.running + 1)
        profiler.stop.side_effect = lambda: setattr(self, "running", self.running - 1)
        return profiler


class Scheduler:
    """A scheduler of a release, reduced to its forward count and its profiler.

    Args:
        profiler: object with that release's methods; the scheduler itself before 0.5.13.
        run_batch: the counting part of that release's `run_batch`.
    """

    def __init__(
        self, device: FakeDevice, profiler: Any, ask: Callable[..., Any], run_batch: Callable[..., None]
    ) -> None:
        self._device, self._profiler, self._ask, self._run_batch = device, profiler, ask, run_batch
        self.view: Any = profiler

    def forwards(self, steps: int) -> list[int]:
        """Run forwards; which of them were recorded."""
        seen, batch = [], MagicMock()
        for step in range(steps):
            self._run_batch(self.view, batch)
            if self._device.running:
                seen.append(step)
        return seen

    def start(self, start_step: int | None, num_steps: int | None) -> Any:
        return self._ask(self._profiler, start_step, num_steps)

    def request(self, request: Any) -> Any:
        return self._profiler._profile(request)


def counting_part(source: str) -> Callable[..., None]:
    """`run_batch` from its first count to its look at the profiler, as the release orders the two."""
    body = method(source, "Scheduler", "run_batch").body
    ends = [
        i
        for i, node in enumerate(body)
        if "_profile_batch_predicate" in (text := ast.unparse(node)) or "self.stop_profile" in text
    ]
    kept = [
        node for node in body[: ends[0] + 1] if node is body[ends[0]] or ast.unparse(node) == "self.forward_ct += 1"
    ]
    assert len(kept) == 2
    function = ast.parse("def run_batch(self, batch): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = kept
    scope: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), "<run_batch of the release>", "exec"), scope)  # noqa: S102
    made: Callable[..., None] = scope["run_batch"]
    return made


def of_release(version: str, folder: Path) -> Callable[[], Scheduler]:
    """Schedulers with the methods of a release that is not installed; one at a time, for they share a device."""
    file, name, methods = NOT_INSTALLED[version]
    sources = own_source("sglang", version, *dict.fromkeys((file, SCHEDULER)))
    device = FakeDevice()
    off = SimpleNamespace(get=lambda: False)
    platform = SimpleNamespace(is_out_of_tree=lambda: False)
    alone = SimpleNamespace(tp_rank=0, dp_size=1, num_dp_ranks=1, pp_size=1, moe_ep_size=1)
    namespace = {
        "gc": gc,
        "os": os,
        "time": time,
        "Path": Path,
        "logger": MagicMock(),
        "torch": device.torch,
        "_is_npu": False,
        "ForwardMode": MagicMock(),
        "current_platform": platform,
        "ProfileMerger": MagicMock(),
        "envs": SimpleNamespace(SGLANG_PROFILE_V2=off),
        "get_parallel": lambda: alone,
        "ProfileReqType": RequestType,
        "ProfileReqOutput": SimpleNamespace,
    }
    release = own_class(sources[file], name, namespace, methods=methods)
    run_batch = counting_part(sources[SCHEDULER])
    unset = "torch_profiler torch_profiler_output_dir rpd_profiler profiler_activities dp_tp_cpu_group tp_cpu_group"
    unset += " profiler_start_forward_ct profiler_target_forward_ct profile_id"
    off_flags = ("profile_in_progress", "profile_by_stage", "merge_profiles", "detailed_annotations")
    given = {"forward_ct": 0, "tp_rank": 0, "ps": alone, "profile_prefix": None, "send_to_tokenizer": MagicMock()}
    given["_apply_detailed_annotations"] = lambda _: None
    kind = RequestType.START_PROFILE
    asked = {"type": kind, "req_type": kind, "output_dir": str(folder), "activities": ["CPU"], "profile_id": "1"}
    asked |= dict.fromkeys(("with_stack", "record_shapes", "profile_prefix", "profile_stages"))
    asked |= dict.fromkeys(("profile_by_stage", "merge_profiles", "detailed_annotations"), False)

    def ask(profiler: Any, start_step: int | None, num_steps: int | None) -> Any:
        request = SimpleNamespace(**asked, start_step=start_step, num_steps=num_steps)
        return (profiler._profile if hasattr(profiler, "_profile") else profiler.profile)(request)

    def make() -> Scheduler:
        device.running = 0
        profiler: Any = release()
        vars(profiler).update({**dict.fromkeys(unset.split()), **dict.fromkeys(off_flags, False), **given})
        scheduler = Scheduler(device, profiler, ask, run_batch)
        if file == MANAGER:
            scheduler.view = SimpleNamespace(forward_ct=0, profiler_manager=profiler)
            profiler.get_forward_ct = lambda: scheduler.view.forward_ct
        return scheduler

    return make


def check_counters(make: Callable[[], Scheduler], version: str) -> None:
    for before, start, steps in product((0, 5), (None, 0, 1, 2, 8), (None, 1, 3)):
        scheduler = make()
        scheduler.forwards(before)
        scheduler.start(start, steps)
        counters = {"start_step": start, "num_steps": steps}
        said = captured_iterations("sglang", version, counters, forward_count=before)
        assert scheduler.forwards(STEPS) == [i for i in range(STEPS) if i in said], (before, start, steps)


def check_windows(make: Callable[[], Scheduler], version: str) -> None:
    for before, begin, length, prompt in product((0, 5), (0, 1, 4), (1, 3, None), (10, 25)):
        window = TokenWindow(begin, None if length is None else begin + length)
        answer = plan(
            window,
            engine="sglang",
            version=version,
            prompt_tokens=prompt,
            max_num_batched_tokens=10,
            num_speculative_tokens=0,
            forward_count=before,
        )
        if answer.fit.kind == "cannot":
            assert begin > 0
            assert version < "0.4.9.post2"
            continue
        assert answer.assumes == ()
        scheduler = make()
        scheduler.forwards(before)
        scheduler.start(answer.values["start_step"], answer.values["num_steps"])
        recorded = scheduler.forwards(STEPS)
        made = [i - answer.prefill_iteration for i in recorded if i >= answer.prefill_iteration]
        stop = STEPS - answer.prefill_iteration if window.end is None else window.end
        assert made == list(range(window.start, stop)), (before, window, prompt)


@pytest.mark.parametrize("version", NOT_INSTALLED)
class TestTheReleasesOwnMethodsWithoutADevice:
    @pytest.fixture
    def make(self, version: str, tmp_path: Path) -> Callable[[], Scheduler]:
        return of_release(version, tmp_path)

    def test_record_the_iterations_that_are_said(self, make: Callable[[], Scheduler], version: str) -> None:
        check_counters(make, version)

    def test_record_each_window_asked_of_them(self, make: Callable[[], Scheduler], version: str) -> None:
        check_windows(make, version)


@pytest.mark.engine_sglang
class TestTheInstalledSglangWithoutADevice:
    @pytest.fixture
    def make(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Scheduler]:
        pytest.importorskip("sglang")
        from sglang.srt.managers.io_struct import ProfileReq
        from sglang.srt.managers.scheduler_components import profiler_manager as module

        alone = SimpleNamespace(tp_rank=0, num_dp_ranks=1, dp_rank=0, pp_size=1, moe_ep_size=1)
        monkeypatch.setattr(module, "get_dp_tp_group", lambda: SimpleNamespace(cpu_group=None))
        monkeypatch.setattr(module, "get_parallel", lambda: alone)
        monkeypatch.setattr(module, "gc", MagicMock())  # a collection at each stop, of a process full of SGLang
        spec = find_spec("sglang.srt.managers.scheduler")
        assert spec is not None
        assert spec.origin is not None
        run_batch = counting_part(Path(spec.origin).read_text(encoding="utf-8"))

        def ask(manager: Any, start_step: int | None, num_steps: int | None) -> Any:
            request = ProfileReq(start_step=start_step, num_steps=num_steps, output_dir=str(tmp_path), profile_id="1")
            return manager._profile(request)

        def make() -> Scheduler:
            device = FakeDevice()
            monkeypatch.setattr(module, "torch", device.torch)
            view = SimpleNamespace(forward_ct=0)
            view.profiler_manager = module.SchedulerProfilerManager(get_forward_ct=lambda: view.forward_ct)
            scheduler = Scheduler(device, view.profiler_manager, ask, run_batch)
            scheduler.view = view
            return scheduler

        return make

    @property
    def version(self) -> str:
        return distribution_version("sglang")

    def test_records_the_iterations_that_are_said(self, make: Callable[[], Scheduler]) -> None:
        check_counters(make, self.version)

    def test_records_each_window_asked_of_it(self, make: Callable[[], Scheduler]) -> None:
        check_windows(make, self.version)

    @pytest.mark.parametrize("before", [0, 7])
    def test_takes_what_is_built_for_it(self, make: Callable[[], Scheduler], tmp_path: Path, before: int) -> None:
        built = build_sglang_profiler_args(TokenWindow(2, 5), save_path=str(tmp_path), forward_count=before)
        assert built.plan.version == self.version
        (request,), keywords = built.manager_call()
        assert keywords == {}
        request.profile_id = "1"
        scheduler = make()
        scheduler.forwards(before)
        assert scheduler.request(request).success
        assert scheduler.forwards(STEPS) == [2, 3, 4]

    def test_refuses_a_stop_after_the_window_and_leaves_an_unreached_start_armed(
        self, make: Callable[[], Scheduler]
    ) -> None:
        """Why the counters are the second choice: docs/counters.md says both."""
        from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

        stop = ProfileReq(req_type=ProfileReqType.STOP_PROFILE)
        scheduler = make()
        scheduler.start(2, 3)
        scheduler.forwards(10)
        assert not scheduler.request(stop).success
        scheduler.start(15, 2)
        scheduler.forwards(2)
        assert not scheduler.request(stop).success
        assert scheduler.forwards(10) == [2, 3]
