"""`model.generate` in an app that knows nothing of profiling, on the real library. Forward n makes response token n."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers

from verl_profiler_conf.capture.backends.torch_profiler import TorchProfiler
from verl_profiler_conf.core.logs import forget_logged_texts
from verl_profiler_conf.engines import in_process
from verl_profiler_conf.engines.transformers import hooks, plugin


def generate(model: Any, ids: Any, new: int = 48, **more: Any) -> Any:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False, **more}
    if "eos_token_id" not in options:
        options.setdefault("min_new_tokens", new)
    return model.generate(ids, **options)


def check(outcome: Any, start: int, end: int, *, which: int = 0, first: int = 0) -> None:
    """The trace holds the forwards of tokens [start, end), whole, each in a range of its own, and no other's."""
    trace, manifest = outcome.traces[which], outcome.captured[which]
    assert trace.forwards == [first + token for token in range(start, end)]
    assert [(lo, hi) for lo, hi, _, _ in trace.ranges] == [(token, token + 1) for token in range(start, end)]
    assert [(row.lo, row.hi) for row in manifest.captured] == [(token, token + 1) for token in range(start, end)]
    ranges, forwards = trace.spans("response_tokens["), trace.spans("forward#")
    for (outer, until), (begin, finish) in zip(ranges, forwards, strict=True):
        assert outer <= begin
        assert finish <= until


@pytest.mark.parametrize(("start", "end"), [(12, 46), (0, 1), (0, 5), (47, 48), (20, 30)])
def test_the_window_asked_for_is_the_window_captured(windowed: Any, model: Any, ids: Any, start: int, end: int) -> None:
    outcome = windowed(lambda: generate(model, ids), profile_token_start=start, profile_token_end=end)
    assert len(outcome.traces) == 1
    check(outcome, start, end)
    assert outcome.captured[0].closed_by == "window"


def test_end_only_starts_at_token_0(windowed: Any, model: Any, ids: Any) -> None:
    check(windowed(lambda: generate(model, ids), profile_token_end=30), 0, 30)


def test_start_only_lasts_until_the_request_ends(windowed: Any, model: Any, ids: Any) -> None:
    outcome = windowed(lambda: generate(model, ids), profile_token_start=40)
    check(outcome, 40, 48)
    assert outcome.captured[0].closed_by == "request_end"


def test_results_are_those_of_the_plain_run(windowed: Any, model: Any, ids: Any) -> None:
    plain = generate(model, ids)
    outcome = windowed(lambda: generate(model, ids), profile_token_start=4, profile_token_end=9)
    assert torch.equal(outcome.result, plain)


def test_sampling_draws_the_same_tokens(windowed: Any, model: Any, ids: Any) -> None:
    def sample() -> Any:
        torch.manual_seed(7)
        return generate(model, ids, do_sample=True, top_k=20)

    plain = sample()
    first = model.forwards
    outcome = windowed(sample, profile_token_start=10, profile_token_end=14)
    assert torch.equal(outcome.result, plain)
    check(outcome, 10, 14, first=first)


class TestEarlyEnds:
    """GenerateBatch of a left-padded batch that hit EOS at different tokens."""

    @pytest.fixture
    def ends(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Make row r emit EOS as its token ends[r], through a public logits processor."""

        def processor(width: int, ends: dict[int, int]) -> Any:
            class Ends(transformers.LogitsProcessor):
                def __call__(self, input_ids: Any, scores: Any) -> Any:
                    scores = scores.clone()
                    scores[:, 2] = -1e9
                    for row, end in ends.items():
                        if input_ids.shape[1] - width == end:
                            scores[row, :] = -1e9
                            scores[row, 2] = 0
                    return scores

            return transformers.LogitsProcessorList([Ends()])

        return processor

    def run(self, model: Any, ids: Any, processor: Any) -> Any:
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        return generate(model, ids, 40, attention_mask=mask, eos_token_id=2, logits_processor=processor)

    def test_a_lead_that_ends_before_the_window_hands_over(
        self, windowed: Any, model: Any, ids: Any, ends: Any
    ) -> None:
        outcome = windowed(
            lambda: self.run(model, ids, ends(ids.shape[1], {0: 6})), profile_token_start=20, profile_token_end=25
        )
        check(outcome, 20, 25)
        assert outcome.captured[0].tracked == ["generate1.row1"]

    def test_a_lead_that_ends_inside_closes_with_it(self, windowed: Any, model: Any, ids: Any, ends: Any) -> None:
        outcome = windowed(
            lambda: self.run(model, ids, ends(ids.shape[1], {0: 22})), profile_token_start=20, profile_token_end=30
        )
        check(outcome, 20, 23)
        assert outcome.captured[0].closed_by == "request_end"

    def test_rows_that_have_ended_are_no_requests(self, windowed: Any, model: Any, ids: Any, ends: Any) -> None:
        outcome = windowed(
            lambda: self.run(model, ids, ends(ids.shape[1], {3: 10, 4: 11})),
            profile_token_start=20,
            profile_token_end=22,
        )
        assert [row.requests for row in outcome.captured[0].rows] == [6, 6]

    def test_any_follows_whoever_is_there(self, windowed: Any, model: Any, ids: Any, ends: Any) -> None:
        outcome = windowed(
            lambda: self.run(model, ids, ends(ids.shape[1], dict.fromkeys(range(7), 22))),
            profile_token_start=20,
            profile_token_end=30,
            track="any",
        )
        check(outcome, 20, 30)


class TestSeveral:
    def test_two_windows_leave_two_traces(self, windowed: Any, model: Any, ids: Any) -> None:
        outcome = windowed(lambda: generate(model, ids, 110), profile_token_windows=[[0, 4], [100, 104]])
        assert len(outcome.traces) == 2
        check(outcome, 0, 4)
        check(outcome, 100, 104, which=1)

    def test_adjacent_windows(self, windowed: Any, model: Any, ids: Any) -> None:
        outcome = windowed(lambda: generate(model, ids), profile_token_windows=[[5, 8], [8, 11]])
        check(outcome, 5, 8)
        check(outcome, 8, 11, which=1)

    def test_the_second_generate_is_captured_when_asked_for(self, windowed: Any, model: Any, ids: Any) -> None:
        def twice() -> None:
            generate(model, ids)
            generate(model, ids)

        outcome = windowed(twice, profile_token_start=10, profile_token_end=13, max_captures=2)
        assert len(outcome.traces) == 2
        check(outcome, 10, 13)
        check(outcome, 10, 13, which=1, first=48)

    def test_and_only_then(self, windowed: Any, model: Any, ids: Any) -> None:
        def twice() -> None:
            generate(model, ids)
            generate(model, ids)

        outcome = windowed(twice, profile_token_start=10, profile_token_end=13)
        assert len(outcome.traces) == 1

    def test_a_window_that_the_first_generate_did_not_reach_is_captured_in_the_second(
        self, windowed: Any, model: Any, ids: Any
    ) -> None:
        def short_then_long() -> None:
            generate(model, ids, 8)
            generate(model, ids, 24)

        outcome = windowed(short_then_long, profile_token_start=10, profile_token_end=13)
        check(outcome, 10, 13, first=8)
        assert len(outcome.manifests) == 1  # word of the unreached window was taken back


class TestSpeculation:
    """Assisted decoding makes several tokens an iteration: every iteration that makes a token of the window, whole."""

    def lengths(self, model: Any, ids: Any, **more: Any) -> tuple[list[int], Any]:
        """Tokens after each verification, from the main model's stopping criteria (public), and the output."""
        seen: list[int] = []

        class Watch(transformers.StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                seen.append(input_ids.shape[1] - ids.shape[1])
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        out = generate(model, ids, 60, stopping_criteria=transformers.StoppingCriteriaList([Watch()]), **more)
        return seen, out

    @pytest.mark.parametrize("window", [(20, 30), (0, 3), (57, 60), (21, 22)])
    def test_prompt_lookup(self, windowed: Any, model: Any, ids: Any, window: tuple[int, int]) -> None:
        one = ids[:1].repeat(1, 3)
        seen: list[int] = []

        def run() -> Any:
            lengths, out = self.lengths(model, one, prompt_lookup_num_tokens=4)
            seen.extend(lengths)
            return out

        outcome = windowed(run, profile_token_start=window[0], profile_token_end=window[1])
        made = list(zip([0, *seen], seen, strict=False))
        wanted = [(lo, hi) for lo, hi in made if hi > window[0] and lo < window[1]]
        numbers = [n for n, (lo, hi) in enumerate(made) if hi > window[0] and lo < window[1]]
        assert any(hi - lo > 1 for lo, hi in made), "the drafts were never accepted: this proves nothing"
        assert [(lo, hi) for lo, hi, _, _ in outcome.traces[0].ranges] == wanted
        assert [row.index for row in outcome.captured[0].rows] == numbers
        assert outcome.traces[0].forwards == numbers
        assert len(outcome.traces) == 1

    def test_an_assistant_model(self, windowed: Any, model: Any, ids: Any) -> None:
        assistant = transformers.LlamaForCausalLM(model.config).eval()
        assistant.load_state_dict(model.state_dict())
        seen: list[int] = []

        def run() -> Any:
            lengths, out = self.lengths(model, ids[:1], assistant_model=assistant)
            seen.extend(lengths)
            return out

        outcome = windowed(run, profile_token_start=20, profile_token_end=30)
        made = list(zip([0, *seen], seen, strict=False))
        numbers = [n for n, (lo, hi) in enumerate(made) if hi > 20 and lo < 30]
        assert any(hi - lo > 1 for lo, hi in made)
        assert outcome.traces[0].forwards == numbers
        assert [(lo, hi) for lo, hi, _, _ in outcome.traces[0].ranges] == [made[n] for n in numbers]


def test_a_streamer(windowed: Any, model: Any, ids: Any) -> None:
    class Collect(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.chunks: list[Any] = []

        def put(self, value: Any) -> None:
            self.chunks.append(value)

        def end(self) -> None:
            self.chunks.append(None)

    streamer = Collect()
    outcome = windowed(lambda: generate(model, ids[:1], streamer=streamer), profile_token_start=5, profile_token_end=9)
    check(outcome, 5, 9)
    assert len(streamer.chunks) == 1 + 48 + 1


def test_a_static_cache(windowed: Any, model: Any, ids: Any) -> None:
    plain = generate(model, ids, cache_implementation="static")
    first = model.forwards
    outcome = windowed(
        lambda: generate(model, ids, cache_implementation="static"), profile_token_start=5, profile_token_end=9
    )
    check(outcome, 5, 9, first=first)
    assert torch.equal(outcome.result, plain)


def test_chunked_prefill_belongs_to_token_0(windowed: Any, model: Any, ids: Any) -> None:
    outcome = windowed(lambda: generate(model, ids, prefill_chunk_size=5), profile_token_start=0, profile_token_end=2)
    assert outcome.traces[0].forwards == [0, 1, 2, 3]  # 12 prompt tokens in 3 chunks make token 0, then token 1
    assert [(lo, hi) for lo, hi, _, _ in outcome.traces[0].ranges] == [(0, 1), (1, 2)]


def test_beam_search_is_refused_aloud(windowed: Any, model: Any, ids: Any, caplog: pytest.LogCaptureFixture) -> None:
    forget_logged_texts()
    with caplog.at_level(logging.WARNING):
        outcome = windowed(lambda: generate(model, ids, num_beams=2), profile_token_start=5, profile_token_end=9)
    assert not outcome.traces
    assert [r.message for r in caplog.records if "beam_search" in r.message] == [
        "no capture of beam_search: beam search moves tokens between rows, so its response tokens cannot be counted"
    ]
    assert outcome.result.shape[1] == 12 + 48


def test_a_window_that_was_never_reached_leaves_word(windowed: Any, model: Any, ids: Any) -> None:
    outcome = windowed(lambda: generate(model, ids), profile_token_start=100, profile_token_end=120)
    assert not outcome.traces
    assert [manifest.furthest_token for manifest in outcome.manifests] == [47]
    assert outcome.manifests[0].trace is None


def test_generate_fails_and_its_error_is_the_jobs(windowed: Any, model: Any, ids: Any, tmp_path: Any) -> None:
    class Fails(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] == 12 + 22:
                raise RuntimeError("the job's own error")
            return scores

    processors = transformers.LogitsProcessorList([Fails()])
    with pytest.raises(RuntimeError, match="the job's own error"):
        windowed(
            lambda: generate(model, ids, logits_processor=processors), profile_token_start=20, profile_token_end=30
        )
    assert len(list((tmp_path / "profile").glob("*.pt.trace.json.gz"))) == 1


def test_without_a_window_nothing_listens(model: Any, ids: Any) -> None:
    plugin.install()
    assert in_process.current_settings() is None
    assert generate(model, ids).shape == (8, 60)


def test_another_profiler_in_the_process_is_left_alone(
    windowed: Any, model: Any, ids: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        outcome = windowed(lambda: generate(model, ids), profile_token_start=5, profile_token_end=9)
    assert not outcome.traces
    assert any("no capture of tokens [5, 9)" in record.message for record in caplog.records)
    assert sum(event.name.startswith("forward#") for event in theirs.events()) == 48


def test_the_jobs_error_comes_first_when_closing_fails_too(
    windowed: Any, model: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] == 12 + 22:
                raise RuntimeError("the job's own error")
            return scores

    stop = TorchProfiler.stop

    def fail(profiler: TorchProfiler) -> None:
        stop(profiler).drop()
        raise OSError("closing the profiler fails as well")

    monkeypatch.setattr(TorchProfiler, "stop", fail)
    processors = transformers.LogitsProcessorList([Fails()])
    with pytest.raises(RuntimeError, match="the job's own error"):
        windowed(
            lambda: generate(model, ids, logits_processor=processors),
            profile_token_start=20,
            profile_token_end=30,
            on_error="raise",
        )


def test_objects_of_another_release_end_the_session_not_the_job(
    windowed: Any, model: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generate(model, ids)

    def fail(_: Any) -> int:
        raise AttributeError("no such attribute in this release")

    monkeypatch.setattr(hooks.Generation, "_max_tokens", fail)
    outcome = windowed(lambda: generate(model, ids), profile_token_start=5, profile_token_end=9)
    assert torch.equal(outcome.result, plain)
    assert [manifest.closed_by for manifest in outcome.manifests] == ["error"]
    assert "no such attribute in this release" in outcome.manifests[0].notes[0]


def test_a_generate_that_cannot_be_windowed_raises_where_that_was_asked_for(
    windowed: Any, model: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise AttributeError("no such attribute in this release")

    monkeypatch.setattr(hooks, "_listening", fail)
    window = {"profile_token_start": 5, "profile_token_end": 9}
    assert not windowed(lambda: generate(model, ids), **window).traces
    with pytest.raises(AttributeError, match="in this release"):
        windowed(lambda: generate(model, ids), **window, on_error="raise")


@pytest.mark.parametrize("beams", [1, 2])
def test_bad_settings_in_the_environment_are_said_once_and_generate_runs(
    model: Any, ids: Any, beams: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.install()
    forget_logged_texts()
    monkeypatch.setenv("VERL_PROFILER_CONF", '{"profile_token_end": 0}')
    for _ in range(2):
        assert generate(model, ids, 8, num_beams=beams).shape == (8, 20)
    (record,) = caplog.records
    assert "profile_token_end=0" in record.getMessage()


def test_a_decode_function_of_the_users_own_that_calls_sample_by_position(windowed: Any, model: Any, ids: Any) -> None:
    """As `custom_generate` takes it. The arguments of `_sample` need not be passed by name."""

    def own(
        model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, *more: Any, **kwargs: Any
    ) -> Any:
        config = kwargs.pop("generation_config")
        return model._sample(input_ids, logits_processor, stopping_criteria, config, *more, **kwargs)

    outcome = windowed(lambda: generate(model, ids, custom_generate=own), profile_token_start=5, profile_token_end=9)
    check(outcome, 5, 9)


def test_a_generate_that_cannot_be_windowed_leaves_word(
    windowed: Any, model: Any, ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise AttributeError("no such attribute in this release")

    monkeypatch.setattr(hooks, "_listening", fail)
    outcome = windowed(lambda: generate(model, ids), profile_token_start=5, profile_token_end=9)
    (manifest,) = outcome.manifests
    assert "no such attribute in this release" in manifest.notes[0]
