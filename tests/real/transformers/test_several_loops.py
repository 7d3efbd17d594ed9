"""Several loops in one process, and what models call inside their own, with torch's profiler and the real library."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny import endless_llama

from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.engines.loop import decode_loop
from verl_profiler_conf.engines.transformers import hooks


@pytest.fixture(autouse=True)
def _log_anew() -> None:
    forget_logged_texts()


def tiny(name: str) -> Any:
    """A Llama whose forwards bear its name in the trace."""
    model = endless_llama(bos_token_id=1)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return mark(model, name)


def mark(model: Any, name: str) -> Any:
    plain, count = model.forward, iter(range(10**9))

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(f"{name}#{next(count)}"):
            return plain(*args, **kwargs)

    forward.__signature__ = __import__("inspect").signature(plain)  # type: ignore[attr-defined]
    model.forward = forward
    return model


def content(trace: Any) -> list[tuple[str, list[str]]]:
    """(range, marks within it), in order; the last entry holds the marks outside of every range."""
    spans = [event for event in trace.events if event.get("ph") == "X" and event.get("cat") == "user_annotation"]
    spans.sort(key=lambda event: float(event["ts"]))
    ranges = [(event, []) for event in spans if event["name"].startswith("response_tokens[")]
    outside: list[str] = []
    for event in spans:
        if "#" not in event["name"]:
            continue
        begin = float(event["ts"])
        homes = [marks for outer, marks in ranges if 0 <= begin - float(outer["ts"]) <= float(outer["dur"])]
        (homes[0] if homes else outside).append(event["name"])
    return [(event["name"].split(")")[0] + ")", marks) for event, marks in ranges] + [("", outside)]


PROMPT = torch.tensor([[3, 4, 5]])


def test_a_short_answer_in_another_thread_meanwhile(windowed: Any) -> None:
    long, short = tiny("LONG"), tiny("SHORT")

    class Meanwhile(transformers.StoppingCriteria):
        def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
            if ids.shape[1] == PROMPT.shape[1] + 12:
                thread = threading.Thread(target=lambda: short.generate(PROMPT, max_new_tokens=3, do_sample=False))
                thread.start()
                thread.join()
            return torch.zeros(1, dtype=torch.bool)

    def run() -> bool:
        criteria = transformers.StoppingCriteriaList([Meanwhile()])
        long.generate(PROMPT, max_new_tokens=40, do_sample=False, stopping_criteria=criteria)
        return torch._C._autograd._profiler_enabled()

    outcome = windowed(run, profile_token_start=10, profile_token_end=20)
    assert outcome.result is False
    (trace,), (manifest,) = outcome.traces, outcome.captured
    expected = [(f"response_tokens[{token}:{token + 1})", [f"LONG#{token}"]) for token in range(10, 20)]
    assert content(trace) == [*expected, ("", [])]
    assert (manifest.closed_by, manifest.other_iterations) == ("window", 3)
    assert "3 iterations of other loops" in manifest.notes[0]


def test_two_loops_turn_by_turn(windowed: Any) -> None:
    def run() -> None:
        first, second = decode_loop(rows=1), decode_loop(rows=1)
        for token in range(20):
            with first.iteration(), torch.profiler.record_function(f"FIRST#{token}"):
                torch.ones(4) + 1
            if token < 8:
                with second.iteration(), torch.profiler.record_function(f"SECOND#{token}"):
                    torch.ones(4) + 1
            if token == 7:
                second.__exit__(None, None, None)
        first.__exit__(None, None, None)

    outcome = windowed(run, profile_token_start=5, profile_token_end=10)
    (trace,), (manifest,) = outcome.traces, outcome.captured
    *ranges, (_, outside) = content(trace)
    assert ranges == [(f"response_tokens[{token}:{token + 1})", [f"FIRST#{token}"]) for token in range(5, 10)]
    assert outside == ["SECOND#5", "SECOND#6", "SECOND#7"]
    assert (manifest.closed_by, manifest.other_iterations) == ("window", 3)
    assert len(outcome.manifests) == 1


def test_loops_of_asyncio_tasks_whose_iterations_overlap(windowed: Any) -> None:
    """An iteration of one task runs while another task awaits inside its own."""

    async def rollout(name: str, tokens: int) -> None:
        with decode_loop(rows=1) as loop:
            for token in range(tokens):
                with loop.iteration():
                    with torch.profiler.record_function(f"{name}#{token}"):
                        torch.ones(4) + 1
                    await asyncio.sleep(0)
                    torch.ones(4) + 1

    async def main() -> None:
        await asyncio.gather(rollout("A", 8), rollout("B", 6))

    outcome = windowed(lambda: asyncio.run(main()), profile_token_start=3, profile_token_end=5)
    (trace,), (manifest,) = outcome.traces, outcome.captured
    *ranges, _ = content(trace)
    assert {mark for _, marks in ranges for mark in marks} <= {"A#3", "A#4"}
    assert [row.lo for row in manifest.rows] == [3, 4]
    assert manifest.other_iterations
    assert any("several ranges each" in note for note in manifest.notes)
    assert all(row.operators for row in manifest.rows)


def test_forwards_in_another_thread_are_said_to_be_missing(windowed: Any, caplog: pytest.LogCaptureFixture) -> None:
    matrix = torch.randn(8, 8)

    async def rollout() -> None:
        with decode_loop(rows=1) as loop:
            for _ in range(30):
                with loop.iteration():
                    await asyncio.to_thread(lambda: matrix @ matrix)

    outcome = windowed(lambda: asyncio.run(rollout()), profile_token_start=10, profile_token_end=20)
    (manifest,) = outcome.captured
    assert [row.operators for row in manifest.rows] == [0] * 10
    assert any("no operator was recorded in 10 of 10 iterations" in note for note in manifest.notes)
    assert "no operator was recorded in 10 of 10 iterations" in caplog.text


def test_each_iteration_in_a_fresh_thread(windowed: Any) -> None:
    def run() -> None:
        loop = decode_loop(rows=1)

        def step(token: int) -> None:
            with loop.iteration(), torch.profiler.record_function(f"STEP#{token}"):
                torch.ones(4) + 1

        for token in range(8):
            thread = threading.Thread(target=step, args=(token,))
            thread.start()
            thread.join()
        loop.__exit__(None, None, None)

    outcome = windowed(run, profile_token_start=3, profile_token_end=6)
    assert [content(trace)[:-1] for trace in outcome.traces] == [
        [(f"response_tokens[{token}:{token + 1})", [f"STEP#{token}"])] for token in (3, 4, 5)
    ]
    assert [manifest.part for manifest in outcome.captured] == [1, 2, 3]
    assert not torch._C._autograd._profiler_enabled()
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_recording_whose_thread_has_ended_does_not_block_the_next(windowed: Any) -> None:
    """A window from token 0 in a loop that changes its thread: the first iteration is lost with its thread."""

    def run() -> None:
        loop = decode_loop(rows=1)

        def step(token: int) -> None:
            with loop.iteration(), torch.profiler.record_function(f"STEP#{token}"):
                torch.ones(4) + 1

        for token in range(4):
            thread = threading.Thread(target=step, args=(token,))
            thread.start()
            thread.join()
        loop.__exit__(None, None, None)

    outcome = windowed(run, profile_token_start=0, profile_token_end=3)
    assert [content(trace)[:-1] for trace in outcome.traces] == [
        [(f"response_tokens[{token}:{token + 1})", [f"STEP#{token}"])] for token in (1, 2)
    ]
    assert any("tokens [0, 1) were not recorded" in note for m in outcome.manifests for note in m.notes)


# -- the job's own profiler --


def own_profiler(begin: int, end: int, tokens: int = 30) -> Callable[[], Any]:
    def run() -> Any:
        own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with decode_loop(rows=2) as loop:
            for token in range(tokens):
                if token == begin:
                    own.start()
                with loop.iteration(), torch.profiler.record_function(f"OWN#{token}"):
                    torch.ones(8, 8) @ torch.ones(8, 8)
                if token == end:
                    own.stop()
        return [event.name for event in own.events() if event.name.startswith("OWN#")]

    return run


def test_the_jobs_own_profiler_goes_first(windowed: Any, caplog: pytest.LogCaptureFixture) -> None:
    outcome = windowed(own_profiler(17, 25), profile_token_start=10, profile_token_end=20)
    assert outcome.result == [f"OWN#{token}" for token in range(17, 26)]
    (trace,), (manifest,) = outcome.traces, outcome.captured
    assert [marks for _, marks in content(trace)[:-1]] == [[f"OWN#{token}"] for token in range(10, 17)]
    assert ([row.lo for row in manifest.rows], manifest.closed_by) == (list(range(10, 17)), "other_profiler")
    (missed,) = [manifest for manifest in outcome.manifests if not manifest.rows]
    assert "the iterations of tokens [17, 20) were not recorded" in missed.notes[0]
    assert "another torch profiler starts in this process inside the window" in caplog.text


def test_and_what_is_left_of_the_window_is_captured_after_it(windowed: Any) -> None:
    outcome = windowed(own_profiler(13, 15), profile_token_start=10, profile_token_end=20)
    assert outcome.result == [f"OWN#{token}" for token in range(13, 16)]
    assert [[row.lo for row in manifest.rows] for manifest in outcome.captured] == [[10, 11, 12], [16, 17, 18, 19]]
    assert [manifest.part for manifest in outcome.captured] == [1, 2]


def test_emit_itt_goes_first_as_well(windowed: Any) -> None:
    def run() -> None:
        with decode_loop(rows=1) as loop:
            for token in range(20):
                with loop.iteration():
                    if token == 12:
                        with torch.autograd.profiler.emit_itt():
                            torch.ones(4) + 1
                    torch.ones(4) + 1

    outcome = windowed(run, profile_token_start=10, profile_token_end=15)
    assert [[row.lo for row in manifest.rows] for manifest in outcome.captured] == [[10, 11, 12], [13, 14]]
    assert not torch._C._autograd._profiler_enabled()


def test_a_profiler_that_is_prepared_before_the_window_goes_first(windowed: Any) -> None:
    """A job's schedule prepares its profiler a step before it records."""

    def run() -> None:
        schedule = torch.profiler.schedule(wait=0, warmup=4, active=4, repeat=1)
        with decode_loop(rows=1) as loop:
            for token in range(20):
                if token == 8:
                    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule)
                    own.start()
                with loop.iteration(), torch.profiler.record_function(f"OWN#{token}"):
                    torch.ones(4) + 1
                if token >= 8:
                    own.step()
                if token == 15:
                    own.stop()
        return [event.name for event in own.events() if event.name.startswith("OWN#")]

    first = windowed(lambda: None, profile_token_start=1)  # nothing runs, so nothing is watched yet
    assert not first.traces

    def capture_first() -> Any:
        with decode_loop(rows=1) as loop:
            for _ in range(3):
                with loop.iteration():
                    torch.ones(4) + 1
        return run()

    outcome = windowed(capture_first, profile_token_windows=[[0, 2], [10, 20]])
    assert outcome.result == [f"OWN#{token}" for token in range(12, 16)]
    assert [[row.lo for row in manifest.rows] for manifest in outcome.captured] == [[0, 1], [16, 17, 18, 19]]


# -- what models call inside --


class Helper:
    """A logits processor that asks another model at each step."""

    def __init__(self) -> None:
        self.model = tiny("HELPER")

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.model.generate(ids[:1, -2:], max_new_tokens=20, do_sample=False)
        return scores


def test_generate_inside_an_iteration_is_part_of_it(windowed: Any) -> None:
    model = tiny("OUTER")

    def run() -> None:
        processors = transformers.LogitsProcessorList([Helper()])
        model.generate(PROMPT, max_new_tokens=24, do_sample=False, logits_processor=processors)

    outcome = windowed(run, profile_token_start=10, profile_token_end=12)
    *ranges, (_, outside) = content(outcome.traces[0])
    assert [name for name, _ in ranges] == ["response_tokens[10:11)", "response_tokens[11:12)"]
    for token, (_, marks) in zip((10, 11), ranges, strict=True):
        assert marks[0] == f"OUTER#{token}"
        assert sum(mark.startswith("HELPER#") for mark in marks) == 20
    assert outside == []
    assert outcome.captured[0].other_iterations == 0


def test_generate_inside_a_decode_loop_is_part_of_it(windowed: Any) -> None:
    helper = tiny("HELPER")

    def run() -> None:
        with decode_loop(rows=1) as loop:
            for _ in range(12):
                with loop.iteration():
                    helper.generate(PROMPT, max_new_tokens=8, do_sample=False)

    outcome = windowed(run, profile_token_start=5, profile_token_end=7)
    assert [manifest.engine for manifest in outcome.manifests] == ["loop"]
    assert [len(marks) for _, marks in content(outcome.traces[0])[:-1]] == [8, 8]


def test_generate_inside_beam_search_is_no_response(windowed: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("OUTER")

    def run() -> None:
        processors = transformers.LogitsProcessorList([Helper()])
        model.generate(PROMPT, max_new_tokens=24, num_beams=2, do_sample=False, logits_processor=processors)

    outcome = windowed(run, profile_token_start=10, profile_token_end=12)
    assert not outcome.traces
    assert [m for m in caplog.messages if "no capture" in m] == [
        "no capture of beam_search: beam search moves tokens between rows, so its response tokens cannot be counted"
    ]
    assert "beam search" in outcome.manifests[0].notes[0]


def test_a_decode_loop_of_the_models_own_that_cannot_be_counted_is_told(
    windowed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, helper = tiny("OUTER"), tiny("HELPER")

    class Own(type(model)):  # type: ignore[misc]
        def _sample(self, input_ids: Any, logits_processor: Any, stopping_criteria: Any, **_: Any) -> Any:
            while not stopping_criteria(input_ids, None).all():
                token = self(input_ids).logits[:, -1].argmax(-1, keepdim=True)
                helper.generate(input_ids[:, -2:], max_new_tokens=20, do_sample=False)
                input_ids = torch.cat([input_ids, token], 1)
            return input_ids

    model.__class__ = Own
    outcome = windowed(
        lambda: [model.generate(PROMPT, max_new_tokens=24, do_sample=False) for _ in range(2)],
        profile_token_start=10,
        profile_token_end=15,
    )
    assert not outcome.traces
    assert sum("Own has a decode loop of its own" in message for message in caplog.messages) == 1
    assert outcome.result[0].shape == (1, 27)


def test_one_that_marks_its_iterations_is_windowed(windowed: Any) -> None:
    model, helper = tiny("OUTER"), tiny("HELPER")

    class Own(type(model)):  # type: ignore[misc]
        def _sample(self, input_ids: Any, logits_processor: Any, stopping_criteria: Any, **_: Any) -> Any:
            finished = False
            while self._has_unfinished_sequences(finished, False, device=input_ids.device):
                token = self(input_ids).logits[:, -1].argmax(-1, keepdim=True)
                helper.generate(input_ids[:, -2:], max_new_tokens=4, do_sample=False)
                input_ids = torch.cat([input_ids, token], 1)
                finished = bool(stopping_criteria(input_ids, None).all())
            return input_ids

    model.__class__ = Own
    outcome = windowed(
        lambda: model.generate(PROMPT, max_new_tokens=24, do_sample=False), profile_token_start=10, profile_token_end=12
    )
    *ranges, (_, outside) = content(outcome.traces[0])
    assert [marks[0] for _, marks in ranges] == ["OUTER#10", "OUTER#11"]
    assert [len(marks) for _, marks in ranges] == [5, 5]
    assert outside == []


def test_one_that_leaves_it_to_the_library_is_windowed(windowed: Any) -> None:
    model = tiny("OUTER")

    class Own(type(model)):  # type: ignore[misc]
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            return super()._sample(*args, **kwargs)

    model.__class__ = Own
    outcome = windowed(
        lambda: model.generate(PROMPT, max_new_tokens=24, do_sample=False), profile_token_start=10, profile_token_end=12
    )
    assert [marks for _, marks in content(outcome.traces[0])[:-1]] == [["OUTER#10"], ["OUTER#11"]]


def test_a_decode_function_of_the_callers_own_is_told(windowed: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("OUTER")

    def own(model: Any, input_ids: Any, **_: Any) -> Any:
        return input_ids

    outcome = windowed(
        lambda: model.generate(PROMPT, max_new_tokens=24, do_sample=False, custom_generate=own), profile_token_start=10
    )
    assert not outcome.traces
    assert "the decode loop that it ran is not hooked" in caplog.text


def csm() -> Any:
    """A speech model whose own decode loop asks a depth decoder, by `generate`, for the codes of each frame."""
    torch.manual_seed(0)
    depth = {
        "num_codebooks": 4,
        "backbone_hidden_size": 32,
        "vocab_size": 35,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    codec = {
        "model_type": "mimi",
        "hidden_size": 16,
        "num_filters": 4,
        "num_hidden_layers": 1,
        "codebook_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "num_quantizers": 4,
        "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8,
        "upsample_groups": 8,
    }
    config = transformers.CsmConfig(
        num_codebooks=4,
        vocab_size=35,
        text_vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=1,
        pad_token_id=2,
        codebook_pad_token_id=2,
        codebook_eos_token_id=3,
        eos_token_id=None,
        audio_token_id=4,
        audio_eos_token_id=5,
        depth_decoder_config=depth,
        codec_config=codec,
    )
    return transformers.CsmForConditionalGeneration(config).eval()


@pytest.mark.skipif(not hasattr(transformers, "CsmForConditionalGeneration"), reason="an older transformers")
def test_a_speech_models_own_loop_is_windowed(windowed: Any) -> None:
    model = mark(csm(), "FRAME")
    mark(model.depth_decoder, "DEPTH")
    ids = torch.tensor([[6, 7, 8, 9]])
    plain = model.generate(ids, max_new_tokens=10, do_sample=False)
    outcome = windowed(
        lambda: model.generate(ids, max_new_tokens=10, do_sample=False), profile_token_start=4, profile_token_end=7
    )
    assert torch.equal(outcome.result, plain)
    *ranges, (_, outside) = content(outcome.traces[0])
    assert [marks[0] for _, marks in ranges] == ["FRAME#14", "FRAME#15", "FRAME#16"]  # ten frames ran before
    assert all(sum(mark.startswith("DEPTH#") for mark in marks) == 3 for _, marks in ranges)
    assert outside == []
    assert len(outcome.captured) == 1


@pytest.mark.parametrize("name", ["csm", "pocket_tts", "vibevoice", "higgs_audio_v2"])
def test_the_loops_of_models_in_the_library_are_countable(name: str) -> None:
    module = pytest.importorskip(f"transformers.models.{name}.generation_{name}")
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    (mixin,) = [kind for kind in kinds if "_sample" in vars(kind)]
    loop = vars(mixin)["_sample"]
    assert hooks._is_countable(getattr(loop, "__wrapped__", loop))
