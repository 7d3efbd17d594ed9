"""The validated configuration: every rule that is not the window's own."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.iterations.planning import ENGINES
from verl_profiler_conf.core.settings import (
    ARMS,
    CONTENTS,
    DEVICES,
    LEVELS,
    MAPPINGS,
    ON_ERRORS,
    OPTIONS,
    TRACKS,
    Settings,
)
from verl_profiler_conf.core.window import TokenWindow

RULES: list[tuple[dict[str, Any], str]] = [
    # choices
    ({"device": "tpu"}, "device='tpu': must be one of auto, cuda, npu, cpu"),
    ({"device": None}, "device=None: must be one of auto, cuda, npu, cpu"),
    ({"track": "leader"}, "track='leader': must be one of lead, any, all"),
    ({"track": ["lead"]}, "track=['lead']: must be one of lead, any, all"),
    ({"arm": "start"}, "arm='start': must be one of job, request"),
    ({"mapping": "token"}, "mapping='token': must be one of tokens, iterations"),
    ({"on_error": "ignore"}, "on_error='ignore': must be one of warn, raise"),
    (
        {"profiler": "npu_window", "level": "Level1"},
        "level='Level1': must be one of level_none, level0, level1, level2",
    ),
    ({"profiler": "torch"}, "profiler='torch': must be one of torch_window, npu_window, torch_memory, nsys_window"),
    # true or false
    ({"enable": "true"}, "enable='true': must be true or false"),
    ({"enable": 1}, "enable=1: must be true or false"),
    ({"all_ranks": None}, "all_ranks=None: must be true or false"),
    ({"profiler": "npu_window", "analysis": "no"}, "analysis='no': must be true or false"),
    # numbers
    ({"max_iterations": 0}, "max_iterations=0: must be an integer from 1 to 2147483647, or null"),
    ({"max_iterations": True}, "max_iterations=True: must be an integer from 1 to 2147483647, or null"),
    ({"max_captures": 0}, "max_captures=0: must be an integer from 1 to 2147483647, or null"),
    ({"max_captures": "1"}, "max_captures='1': must be an integer from 1 to 2147483647, or null"),
    ({"skip_captures": -1}, "skip_captures=-1: must be an integer from 0 to 2147483647"),
    ({"skip_captures": None}, "skip_captures=None: must be an integer from 0 to 2147483647"),
    ({"skip_captures": True}, "skip_captures=True: must be an integer from 0 to 2147483647"),
    (
        {"skip_captures": 1, "mapping": "iterations"},
        "skip_captures=1: an engine's own counters cannot let a window go by first: set it to 0, or mapping=tokens",
    ),
    # lists
    ({"ranks": 0}, "ranks=0: must be a list of ranks, integers from 0"),
    ({"ranks": "0"}, "ranks='0': must be a list of ranks, integers from 0"),
    ({"ranks": [0, -1]}, "ranks=[0, -1]: must be a list of ranks, integers from 0"),
    ({"ranks": [True]}, "ranks=[True]: must be a list of ranks, integers from 0"),
    ({"ranks": [0.0]}, "ranks=[0.0]: must be a list of ranks, integers from 0"),
    ({"ranks": []}, "ranks=[]: names no rank; to profile nothing, set enable=false"),
    ({"contents": "cpu"}, "contents='cpu': must be a list of cpu, cuda, npu, memory, shapes, stack, module"),
    ({"contents": ["gpu"]}, "contents=['gpu']: must be a list of cpu, cuda, npu, memory, shapes, stack, module"),
    ({"contents": [1]}, "contents=[1]: must be a list of cpu, cuda, npu, memory, shapes, stack, module"),
    # texts
    ({"save_path": 3}, "save_path=3: must be text, or null"),
    (
        {"save_path": "$HOME/traces"},
        "save_path='$HOME/traces': has $HOME, which is not expanded; in a Hydra config, ${oc.env:HOME} is",
    ),
    (
        {"save_path": "s3://bucket/$USER"},
        "save_path='s3://bucket/$USER': has $USER, which is not expanded; in a Hydra config, ${oc.env:USER} is",
    ),
    *(
        ({"save_path": path}, f"save_path={path!r}: is no URL, which has two slashes ({scheme}://); a folder is ./")
        for path, scheme in (("s3:/bucket/traces", "s3"), ("file:/traces", "file"), ("dbfs:/traces", "dbfs"))
    ),
    ({"gather": "always"}, "gather='always': must be one of auto, never"),
    ({"gather_limit": "1GB"}, "gather_limit='1GB': must be a size"),
    ({"report": "pdf"}, "report='pdf': must be html, or null"),
    ({"report": True}, "report=True: must be text, or null"),
    (
        {"report": "html", "mapping": "iterations"},
        "report='html': is of captures, and with mapping=iterations the engine writes its own",
    ),
    # what does not go together
    ({"device": "cuda", "contents": ["cpu", "npu"]}, "contents=['cpu', 'npu']: npu cannot be recorded on device=cuda"),
    ({"device": "npu", "contents": ["cuda"]}, "contents=['cuda']: cuda cannot be recorded on device=npu"),
    ({"device": "cpu", "contents": ["cuda"]}, "contents=['cuda']: cuda cannot be recorded on device=cpu"),
    ({"device": "cpu", "contents": ["npu"]}, "contents=['npu']: npu cannot be recorded on device=cpu"),
    (
        {"profiler": "npu_window", "contents": ["cuda"]},
        "contents=['cuda']: cuda cannot be recorded on device=npu",
    ),
    (
        {"profiler": "torch_memory", "device": "cpu"},
        "device='cpu': must be auto or cuda for torch_memory: allocator history needs CUDA",
    ),
    (
        {"profiler": "nsys_window", "device": "npu"},
        "device='npu': must be auto or cuda for nsys_window: nsys is switched through the CUDA runtime",
    ),
    (
        {"profiler": "npu_window", "device": "cuda"},
        "device='cuda': must be auto or npu for npu_window: it drives the profiler of Ascend NPUs; torch_window takes",
    ),
    (
        {"profiler": "torch_memory", "contents": ["memory"]},
        "contents=['memory']: cannot be chosen for torch_memory; leave it empty",
    ),
    (
        {"profiler": "nsys_window", "contents": ["cuda"]},
        "contents=['cuda']: cannot be chosen for nsys_window; leave it empty",
    ),
    (
        {"device": "cuda", "level": "level1"},
        "level='level1': is for Ascend only: use npu_window, or set device=npu",
    ),
    ({"analysis": True}, "analysis=True: is for Ascend only: use npu_window, or set device=npu"),
    (
        {"mapping": "iterations", "profile_token_windows": [[0, 4], [8, 9]]},
        "mapping='iterations': an engine's own counters hold one window, and profile_token_windows has 2",
    ),
    # the engine's facts
    ({"engine": "vllm"}, "engine='vllm': must hold name, version, prompt_tokens, max_num_batched_tokens, num_spec"),
    (
        {"engine": {"prompt_tokens": 0}},
        "engine.prompt_tokens=0: must be an integer from 1 to 2147483647, or null",
    ),
    (
        {"engine": {"num_speculative_tokens": -1}},
        "engine.num_speculative_tokens=-1: must be an integer from 0 to 2147483647, or null",
    ),
    ({"engine": {"version": 0.12}}, "engine.version=0.12: must be text, or null"),
    (
        {"engine": {"version": "0.12.0"}},
        "engine.version='0.12.0': needs the engine's name: set engine.name too",
    ),
    (
        {"engine": {"name": "vLLM", "version": "0.11.0"}},
        "engine.name='vLLM': must be one of auto, vllm, sglang, tensorrt_llm, transformers",
    ),
    ({"engine": {"tokens": 1}}, "engine.tokens=1: no such setting; there are max_num_batched_tokens, name, "),
    # what nobody knows
    ({"profile_token_stop": 4}, "profile_token_stop=4: no such setting; there are all_ranks, analysis, arm, "),
]


@pytest.mark.parametrize(("raw", "message"), RULES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_rule(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.from_mapping(raw)
    assert str(refused.value).startswith(message)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(("raw", "message"), RULES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_message_names_the_full_key(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.from_mapping(raw, prefix="train.prof.")
    assert refused.value.key == "train.prof." + message.partition("=")[0]
    assert str(refused.value).startswith(refused.value.key + "=")


def test_window_rules_hold_here_too() -> None:
    with pytest.raises(ConfigError, match=r"^p\.profile_token_end=5: .* p\.profile_token_start=20$"):
        Settings.from_mapping({"profile_token_start": 20, "profile_token_end": 5}, prefix="p.")


def test_nothing_set_is_the_contracts_defaults() -> None:
    settings = Settings.from_mapping({})
    assert settings == Settings(windows=(TokenWindow(0, None),))
    assert {
        name: getattr(settings, name)
        for name in ("enable", "device", "track", "max_iterations", "max_captures", "arm", "mapping", "contents")
    } == {
        "enable": True,
        "device": "auto",
        "track": "lead",
        "max_iterations": None,
        "max_captures": 1,
        "arm": "job",
        "mapping": "tokens",
        "contents": (),
    }
    assert settings.skip_captures == 0
    assert (settings.level, settings.analysis, settings.ranks, settings.all_ranks) == ("level0", False, (0,), False)
    assert (settings.save_path, settings.on_error, settings.option) == (None, "warn", "torch_window")


def test_ascend_options_go_with_an_ascend_device() -> None:
    for raw in ({"profiler": "npu_window"}, {"device": "npu"}):
        settings = Settings.from_mapping({**raw, "level": "level2", "analysis": True, "contents": ["npu", "cpu"]})
        assert (settings.level, settings.analysis, settings.contents) == ("level2", True, ("npu", "cpu"))


def test_lists_keep_their_order_and_lose_repetitions() -> None:
    settings = Settings.from_mapping({"ranks": [3, 0, 3], "contents": ("stack", "cpu", "stack")})
    assert (settings.ranks, settings.contents) == ((3, 0), ("stack", "cpu"))


def test_no_rank_is_needed_where_all_capture() -> None:
    assert Settings.from_mapping({"ranks": [], "all_ranks": True}).ranks == ()


def test_null_lists_and_texts_are_the_defaults() -> None:
    settings = Settings.from_mapping({"ranks": None, "contents": None, "save_path": "", "engine": None})
    assert (settings.ranks, settings.contents, settings.save_path, settings.engine) == ((0,), (), None, {})


def test_settings_cannot_be_changed() -> None:
    settings = Settings.from_mapping({})
    with pytest.raises(FrozenInstanceError):
        settings.track = "all"  # type: ignore[misc]


# -- through the environment -------------------------------------------------------------------------------------------


@st.composite
def valid(draw: st.DrawFn) -> dict[str, Any]:
    option = draw(st.sampled_from(list(OPTIONS)))
    device = draw(st.sampled_from(OPTIONS[option].devices))
    raw: dict[str, Any] = {
        "profiler": option,
        "device": device,
        "enable": draw(st.booleans()),
        "track": draw(st.sampled_from(TRACKS)),
        "arm": draw(st.sampled_from(ARMS)),
        "mapping": draw(st.sampled_from(MAPPINGS)),
        "on_error": draw(st.sampled_from(ON_ERRORS)),
        "max_iterations": draw(st.none() | st.integers(1, 99)),
        "max_captures": draw(st.none() | st.integers(1, 99)),
        "ranks": draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        "all_ranks": draw(st.booleans()),
        "save_path": draw(st.none() | st.text().filter(lambda text: "$" not in text)),
        "label": draw(st.none() | st.text()),
        "run_id": draw(st.text()),
        "engine": draw(st.sampled_from([{}, {"name": "vllm", "version": "0.32.0", "prompt_tokens": 64}])),
    }
    if raw["mapping"] == "tokens":
        raw["skip_captures"] = draw(st.integers(0, 99))
    if option == "npu_window" or device == "npu":
        raw |= {"level": draw(st.sampled_from(LEVELS)), "analysis": draw(st.booleans())}
    if option in ("torch_window", "npu_window"):
        raw["contents"] = draw(st.lists(st.sampled_from([item for item in CONTENTS if item not in ("cuda", "npu")])))
    start = draw(st.none() | st.integers(0, 50))
    if raw["mapping"] == "tokens" and draw(st.booleans()):
        raw["profile_token_windows"] = [[start, 60], [70, draw(st.none() | st.integers(71, 80))]]
    else:
        raw |= {"profile_token_start": start, "profile_token_end": draw(st.none() | st.integers(51, 60))}
    return raw


def test_a_job_publishes_its_folder_whatever_its_name() -> None:
    text = '{"profile_token_end": 8, "save_path": "/runs/$HOME/profile"}'
    assert Settings.from_json(text).save_path == "/runs/$HOME/profile"
    with pytest.raises(ConfigError, match="is not expanded"):
        Settings.from_json(text.replace("/runs/", ""))


@given(raw=valid())
def test_settings_survive_the_environment(raw: dict[str, Any]) -> None:
    settings = Settings.from_mapping(raw)
    text = settings.to_json()
    assert Settings.from_json(text) == settings
    assert "\n" not in text


@pytest.mark.parametrize("path", ["a:b/c", "C:/traces", "./s3:/bucket", "/s3:/bucket", "s3:bucket"])
def test_a_folder_with_a_colon_is_one(path: str) -> None:
    assert Settings.from_mapping({"save_path": path}).save_path == path


def test_every_engine_with_counters_can_be_named() -> None:
    for engine in ENGINES:
        assert Settings.from_mapping({"engine": {"name": engine, "version": "1.0"}}).engine["name"] == engine


def test_every_setting_is_in_the_json() -> None:
    keys = set(json.loads(Settings.from_mapping({}).to_json()))
    named = {field.name for field in fields(Settings)} - {"windows", "option"}
    assert keys == named | {"profiler", "profile_token_start", "profile_token_end"}


def test_a_user_can_write_the_variable_by_hand() -> None:
    settings = Settings.from_json('{"profile_token_start": 20, "profile_token_end": 80, "save_path": "/tmp/p"}')
    assert settings.windows == (TokenWindow(20, 80),)
    assert settings.option == "torch_window"


@pytest.mark.parametrize("text", ["", "20:80", "[1]", "{", '"{}"', "null", "[" * 100_000])
def test_other_text_in_the_variable_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^VERL_PROFILER_CONF=.*must be one JSON object") as refused:
        Settings.from_json(text)
    assert len(str(refused.value).splitlines()) == 1


def test_bad_setting_in_the_variable_is_named_with_it() -> None:
    with pytest.raises(ConfigError, match=r"^VERL_PROFILER_CONF\.profile_token_end=0: "):
        Settings.from_json('{"profile_token_end": 0}')


def test_devices_are_the_contracts() -> None:
    assert set(DEVICES) == {"auto", "cuda", "npu", "cpu"}
    for name, option in OPTIONS.items():
        assert option.name == name
        assert set(option.devices) <= set(DEVICES)
        assert bool(option.reason) == (option.devices != DEVICES)  # a restriction is always explained
