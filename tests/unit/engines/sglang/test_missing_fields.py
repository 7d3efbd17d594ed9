"""An SGLang whose objects lack a field that is read: the engine runs as ever, and one line says what is missing.

On stand-ins for the objects, since the real ones have these fields.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sglang_schedule import WIDEST, make_batch, make_request, make_result
from taken_away import take_away

from verl_profiler_conf.capture.live import close_all
from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.engines.sglang import client, hooks

torch = pytest.importorskip("torch")

TOKENS = 8
WINDOW = [(2, 3), (3, 4)]


class Scheduler:
    """As SGLang's, from the hook's side: the next iteration starts before the result of the last is processed."""

    lacks = ""

    def __init__(self, *, speculative: bool = False) -> None:
        self.is_generation = True
        self.spec_algorithm = SimpleNamespace(is_none=lambda: not speculative)
        self.server_args = SimpleNamespace(
            speculative_num_draft_tokens=WIDEST, pp_size=1, enable_dp_attention=False, dp_size=1
        )
        self.tp_rank, self.tp_size, self.pp_rank, self.pp_size, self.dp_rank = 0, 1, 0, 1, None
        self.enable_pdmux = False
        self.disaggregation_mode = SimpleNamespace(name="NULL")
        self.chunked_req = self.running_batch = self.last_batch = self.cur_batch = None
        self.waiting_queue: list[Any] = []
        self.result_queue: deque[Any] = deque()
        self.iterations = 0
        take_away(self, self.lacks)

    def run_batch(self, batch: Any) -> Any:
        torch.sin(torch.ones(3))
        self.iterations += 1
        return SimpleNamespace(delay_sample_func=None)

    def launch_batch_sample_if_needed(self, result: Any, batch: Any) -> None: ...

    def on_idle(self) -> None: ...

    def is_fully_idle(self) -> bool:
        return True


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Scheduler]]:
    """A scheduler class that has been hooked, with a window in force."""
    forget_logged_texts()
    raw = {"profile_token_start": 2, "profile_token_end": 4, "save_path": str(tmp_path), "device": "cpu"}
    monkeypatch.setenv(ENV_NAME, json.dumps(raw))
    monkeypatch.setattr(hooks, "_in_every_iteration", [])
    hooked = type("Scheduler", (Scheduler,), dict(vars(Scheduler)))
    hooks._hook_scheduler(SimpleNamespace(Scheduler=hooked))
    yield hooked
    close_all()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def captured(folder: Path) -> list[tuple[int, int]]:
    manifests = [json.loads(path.read_text()) for path in sorted(folder.glob("*.manifest.json"))]
    return [(row["lo"], row["hi"]) for manifest in manifests for row in manifest["rows"]]


def generate(scheduler: Any, batch_lacks: str = "", result_lacks: str = "") -> None:
    """A response, one result behind, by an engine whose batches or results lack a field. Every iteration has to run."""
    request = make_request("a", 3, TOKENS, ignore_eos=False)
    request.sampling_params.custom_params = None
    request.tokenizer = SimpleNamespace(eos_token_id=1, additional_stop_token_ids=None)
    speculative = not scheduler.spec_algorithm.is_none() if hasattr(scheduler, "spec_algorithm") else False
    queue = getattr(scheduler, "result_queue", deque())
    for made in range(TOKENS):
        mode = "DECODE" if made else "EXTEND"
        batch = make_batch(mode, [request], None if speculative else [3 + made])
        result = make_result([7], [1] if speculative and made else None)
        take_away(batch, batch_lacks)
        take_away(result, result_lacks)
        scheduler.run_batch(batch)
        queue.append((batch, result))
        if len(queue) > 1:
            queue.popleft()
            if hasattr(request, "output_ids"):
                request.output_ids.append(7)
    queue.clear()
    request.finished_reason = "length"
    scheduler.on_idle()
    close_all()
    assert scheduler.iterations == TOKENS


@pytest.mark.parametrize("speculative", [False, True])
def test_nothing_is_missing(
    kind: type[Scheduler], tmp_path: Path, caplog: pytest.LogCaptureFixture, speculative: bool
) -> None:
    generate(kind(speculative=speculative))
    assert captured(tmp_path) == WINDOW
    assert lines(caplog) == []


@pytest.mark.parametrize(
    "path",
    [
        "is_generation",
        "spec_algorithm",
        "spec_algorithm.is_none",
        "server_args",
        "tp_size",
        "pp_rank",
        "dp_rank",
        "pp_size",
    ],
)
def test_scheduler_without_a_field(
    path: str, kind: type[Scheduler], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind.lacks = path
    scheduler = kind()
    scheduler.spec_algorithm = SimpleNamespace(is_none=lambda: True)  # this test reads it
    generate(scheduler)
    (line,) = lines(caplog)
    assert f"no attribute '{path.rpartition('.')[2]}'" in line
    assert captured(tmp_path) == []


@pytest.mark.parametrize(
    "path",
    [
        "server_args.speculative_num_draft_tokens",
        "server_args.pp_size",
        "server_args.enable_dp_attention",
        "enable_pdmux",
        "disaggregation_mode",
        "disaggregation_mode.name",
        "chunked_req",
        "running_batch",
        "last_batch",
        "cur_batch",
        "result_queue",
    ],
)
@pytest.mark.parametrize("speculative", [False, True])
def test_scheduler_without_a_field_that_is_taken_for_absent(
    path: str, speculative: bool, kind: type[Scheduler], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind.lacks = path
    generate(kind(speculative=speculative))
    assert lines(caplog) == []
    rows = captured(tmp_path)
    assert {token for lo, hi in rows for token in range(lo, hi)} >= {2, 3}


@pytest.mark.parametrize(
    "path",
    [
        "reqs",
        "forward_mode",
        "seq_lens_cpu",
        "encoder_lens_cpu",
        "decoding_reqs",
        "reqs.*.rid",
        "reqs.*.origin_input_ids",
        "reqs.*.output_ids",
        "reqs.*.sampling_params",
        "reqs.*.sampling_params.max_new_tokens",
        "reqs.*.sampling_params.ignore_eos",
        "reqs.*.sampling_params.stop_token_ids",
        "reqs.*.finished_reason",
        "reqs.*.finished_len",
        "reqs.*.tokenizer",
        "reqs.*.eos_token_ids",
    ],
)
def test_batch_without_a_field(
    path: str, kind: type[Scheduler], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate(kind(), batch_lacks=path)
    (line,) = lines(caplog)
    assert path.rpartition(".")[2] in line
    manifests = [json.loads(file.read_text()) for file in tmp_path.glob("*.manifest.json")]
    assert [manifest["closed_by"] for manifest in manifests] == ["error"]


@pytest.mark.parametrize(
    "path",
    [
        "reqs.*.sampling_params.custom_params",
        "reqs.*.tokenizer.eos_token_id",
        "reqs.*.tokenizer.additional_stop_token_ids",
    ],
)
def test_batch_without_a_field_that_not_every_request_has(
    path: str, kind: type[Scheduler], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate(kind(), batch_lacks=path)
    assert captured(tmp_path) == WINDOW
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("path", "speculative"),
    [("next_token_ids", False), ("copy_done", False), ("accept_lens", True), ("copy_done", True)],
)
def test_result_without_a_field(
    path: str, speculative: bool, kind: type[Scheduler], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate(kind(speculative=speculative), result_lacks=path)
    (line,) = lines(caplog)
    assert f"no attribute '{path}'" in line


def publish(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    monkeypatch.setenv(ENV_NAME, json.dumps({**json.loads(os.environ[ENV_NAME]), **settings}))


def test_scheduler_that_does_not_say_whether_it_is_idle(
    kind: type[Scheduler], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(monkeypatch, profile_token_start=100, profile_token_end=102)
    monkeypatch.delattr(Scheduler, "is_fully_idle")
    del kind.is_fully_idle
    generate(kind())
    (line,) = lines(caplog)
    assert "no attribute 'is_fully_idle'" in line


@pytest.mark.parametrize("lacks", ["waiting_queue", "running_batch.reqs"])
def test_start_profile_on_a_scheduler_whose_requests_cannot_be_listed(
    lacks: str, kind: type[Scheduler], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only `track: any` and `all` look at them."""
    publish(monkeypatch, arm="request", track="any")
    structs: Any = ModuleType("structs")
    structs.ProfileReqOutput = SimpleNamespace
    monkeypatch.setitem(sys.modules, "structs", structs)
    monkeypatch.setattr(hooks, "ANSWERS", "structs")

    class Manager:
        def _profile(self, recv_req: Any) -> str:
            return "SGLang's own"

    hooks._hook_profile("Manager", "_profile")(SimpleNamespace(Manager=Manager))
    scheduler = kind()
    scheduler.running_batch = SimpleNamespace(reqs=[])
    take_away(scheduler, lacks)
    answer: Any = Manager()._profile(SimpleNamespace(type=SimpleNamespace(name="START_PROFILE")))
    assert answer.success, "a client would raise otherwise"
    generate(scheduler)
    (line,) = lines(caplog)
    assert f"no attribute '{lacks.rpartition('.')[2]}'" in line


# -- the front end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", ["", "server_args", "RpcReqInput", "sock_send", "recv"])
def test_engine_that_cannot_ask_its_schedulers(
    lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_logged_texts()
    monkeypatch.setattr(client, "is_too_old", lambda: False)
    monkeypatch.setattr(client, "_schedulers_live", lambda: True)
    structs: Any = ModuleType("sglang.srt.managers.io_struct")
    structs.RpcReqInput = SimpleNamespace
    structs.sock_send = lambda socket, request: None
    managers: Any = ModuleType("sglang.srt.managers")
    managers.io_struct = structs
    for name, module in (("sglang", ModuleType("sglang")), ("sglang.srt", ModuleType("sglang.srt"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", managers)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", structs)

    class Engine:
        def __init__(self) -> None:
            self.send_to_rpc = SimpleNamespace(poll=lambda _: True, recv=lambda: None)
            self.server_args = SimpleNamespace(dp_size=1)

        def shutdown(self) -> str:
            return "ended"

    client._hook_engine(SimpleNamespace(Engine=Engine))
    engine = Engine()
    client._windowed[engine] = True
    for thing in (engine, structs, engine.send_to_rpc):
        take_away(thing, lacks)
    assert [engine.shutdown(), engine.shutdown()] == ["ended"] * 2
    start = "SGLang ends before its captures are finished: AttributeError"
    assert [line[: len(start)] for line in lines(caplog)] == [start] * bool(lacks)
