"""Anything in what a scheduler tells a worker: the engine gets its result, and the hook never raises."""

from __future__ import annotations

import json
import os
import tempfile
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from changed_outputs import GONE, Changed
from hostile import ANY_VALUE, property_tests
from hypothesis import strategies as st
from sglang_schedule import make_batch, make_request
from vllm_worker import hooked_class, output

from verl_profiler_conf.capture.session import close_all
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines.sglang import hooks as sglang
from verl_profiler_conf.engines.vllm import hooks as vllm

ANYTHING = st.one_of(st.just(GONE), ANY_VALUE)
TRACKS = st.sampled_from(["lead", "any", "all"])


def changes(*names: str) -> Any:
    return st.dictionaries(st.sampled_from(names), ANYTHING, max_size=2)


VLLM = st.lists(
    st.fixed_dictionaries(
        {
            "whole": changes(*vars(output({}))),
            "cached": changes("req_ids", "num_computed_tokens", "num_output_tokens", "resumed_req_ids"),
            "new": changes("req_id", "prompt_token_ids", "num_computed_tokens", "sampling_params"),
        }
    ),
    min_size=1,
    max_size=4,
)


def changed_output(made: int, change: dict[str, dict[str, Any]]) -> Any:
    told = output({"a": 1}, made=made) if made else output({"a": 4}, new=("a",))
    told.scheduled_cached_reqs = Changed(told.scheduled_cached_reqs, **change["cached"])
    told.scheduled_new_reqs = [Changed(new, **change["new"]) for new in told.scheduled_new_reqs]
    return Changed(told, **change["whole"])


def published(folder: str, track: str) -> Any:
    # no iteration comes to the window: what the device profiler does is tested elsewhere
    raw = {"profile_token_start": 500, "profile_token_end": 600, "save_path": folder, "track": track, "device": "cpu"}
    return patch.dict(os.environ, {ENV_NAME: json.dumps(raw)})


def check_vllm(example: tuple[str, list[Any]]) -> None:
    track, outputs = example
    with tempfile.TemporaryDirectory() as folder, published(folder, track):
        kind = hooked_class()
        worker = kind()
        worker.returns = "result"
        try:
            for made, change in enumerate(outputs):
                assert worker.execute_model(changed_output(made, change)) == "result"
                worker.sample_tokens(None)
            worker.shutdown()
        finally:
            vllm._in_every_iteration[:] = [m for m in vllm._in_every_iteration if m._owner is not kind]
            vllm._samplings[:] = [m for m in vllm._samplings if m._owner is not kind]
            close_all()


test_any_vllm_output, test_any_vllm_output_long = property_tests(check_vllm, st.tuples(TRACKS, VLLM), inputs=4)


SGLANG = st.lists(
    st.fixed_dictionaries(
        {
            "whole": changes("reqs", "forward_mode", "seq_lens_cpu", "encoder_lens_cpu", "decoding_reqs"),
            "req": changes(*vars(make_request("r", 1))),
            "mode": changes("is_decode", "is_prebuilt"),
        }
    ),
    min_size=1,
    max_size=4,
)


class Scheduler:
    """Has just the members that are read."""

    def __init__(self) -> None:
        self.is_generation = True
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.server_args = SimpleNamespace()
        self.tp_rank = self.pp_rank = 0
        self.tp_size = self.pp_size = 1
        self.dp_rank = None

    def run_batch(self, _: Any) -> str:
        return "result"

    def is_fully_idle(self) -> bool:
        return True

    def on_idle(self) -> None:
        pass


run_batch, on_idle = sglang._around_run(Scheduler.run_batch), sglang._around_idle(Scheduler.on_idle)


def check_sglang(example: tuple[str, list[Any]]) -> None:
    track, batches = example
    with tempfile.TemporaryDirectory() as folder, published(folder, track):
        scheduler = Scheduler()
        sglang.attach(scheduler)
        try:
            for made, change in enumerate(batches):
                batch = make_batch("DECODE", [Changed(make_request("r", 3), **change["req"])], [4 + made])
                batch.forward_mode = Changed(batch.forward_mode, **change["mode"])
                assert run_batch(scheduler, Changed(batch, **change["whole"])) == "result"
            on_idle(scheduler)
        finally:
            close_all()


test_any_sglang_batch, test_any_sglang_batch_long = property_tests(check_sglang, st.tuples(TRACKS, SGLANG), inputs=4)
