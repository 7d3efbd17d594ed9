"""The option group in a config: where its node can be, what it holds, and what resolves there."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clone import CLONE
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, ValidationError

from verl_profiler_conf import ConfigError, Settings, validate
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.launch.options import SCHEMAS
from verl_profiler_conf.schema.field_docs import describe, summary
from verl_profiler_conf.schema.nodes import find_windows
from verl_profiler_conf.schema.options import TorchWindow

Compose = Callable[..., DictConfig]

CONTRACT = {
    "enable": True,
    "device": "auto",
    "profile_token_start": None,
    "profile_token_end": None,
    "profile_token_windows": [],
    "track": "lead",
    "max_iterations": None,
    "max_captures": 1,
    "skip_captures": 0,
    "part_iterations": 256,
    "arm": "job",
    "mapping": "tokens",
    "contents": [],
    "ranks": [0],
    "all_ranks": False,
    "save_path": None,
    "gather": "auto",
    "gather_limit": "1GiB",
    "report": None,
    "on_error": "warn",
    "engine": {
        "name": "auto",
        "version": "auto",
        "prompt_tokens": None,
        "max_num_batched_tokens": None,
        "num_speculative_tokens": None,
    },
}
ASCEND = {"level": "level0", "analysis": False}
VERL = {"steps": [2], "roles": ["rollout"]}
FIELDS: dict[str, dict[str, Any]] = {
    "torch_window": CONTRACT,
    "npu_window": CONTRACT | ASCEND,
    "torch_memory": CONTRACT,
    "nsys_window": CONTRACT,
    "verl_torch_window": CONTRACT | VERL | {"arm": "request"},
    "verl_npu_window": CONTRACT | ASCEND | VERL | {"arm": "request"},
    "none": CONTRACT | ASCEND | VERL | {"enable": False},
}
COUNTERS = {
    "vllm": {"delay_iterations": 21, "max_iterations": 60},
    "sglang": {"start_step": 21, "num_steps": 60},
}
WINDOW = ("profiler.profile_token_start=20", "profiler.profile_token_end=80")


def plain(node: Any) -> dict[str, Any]:
    return OmegaConf.to_container(node, resolve=True)  # type: ignore[return-value]


def test_the_options_are_the_files_of_the_group() -> None:
    folder = CLONE / "verl_profiler_conf" / "conf" / "profiler"
    assert set(SCHEMAS) <= {path.stem for path in folder.glob("*.yaml")}
    assert set(FIELDS) == set(SCHEMAS)


@pytest.mark.parametrize("option", FIELDS)
def test_option_holds_the_contracts_fields(composed: Compose, option: str) -> None:
    node = composed(f"+profiler={option}").profiler
    assert OmegaConf.get_type(node) is SCHEMAS[option]
    held = OmegaConf.to_container(node)
    assert isinstance(held, dict)
    held.pop("iterations")
    assert held == {"option": option, **FIELDS[option]}


@pytest.mark.parametrize("option", FIELDS)
def test_every_field_is_documented(option: str) -> None:
    docs = {doc.key: doc for doc in describe(SCHEMAS[option])}
    for key, default in FIELDS[option].items():
        assert docs[key].help.endswith("."), key
        if key != "engine":
            assert docs[key].default == default
    assert {key for key in docs if key.startswith("engine.")} == {f"engine.{fact}" for fact in CONTRACT["engine"]}
    assert all(doc.help for doc in docs.values())
    assert summary(SCHEMAS[option]).endswith(".")


def test_the_callback_is_added_by_every_option_but_none(composed: Compose) -> None:
    from hydra import compose

    for option in SCHEMAS:
        cfg = compose("plain", overrides=[f"+profiler={option}"], return_hydra_config=True)
        assert ("verl_profiler_conf" in cfg.hydra.callbacks) == (option != "none")
        assert ("VERL_PROFILER_CONF_CALLBACK" in cfg.hydra.job.env_set) == (option != "none")


@pytest.mark.parametrize(
    ("name", "overrides", "path"),
    [
        ("plain", ["+profiler=torch_window"], "profiler"),
        ("with_null", ["profiler=torch_window"], "profiler"),
        ("own_node", ["profiler@train.prof=torch_window"], "train.prof"),
        ("plain", ["+profiler@train.prof=torch_window"], "train.prof"),
        ("plain", ["+profiler@profiler=torch_window"], "profiler"),
    ],
)
def test_the_node_can_be_anywhere(composed: Compose, name: str, overrides: list[str], path: str) -> None:
    from hydra import compose

    window = [f"{path}.profile_token_start=20", f"{path}.profile_token_end=80"]
    cfg = compose(name, overrides=[*overrides, *window], return_hydra_config=True)
    assert [(node.path, node.option) for node in find_windows(cfg)] == [(path, "torch_window")]
    assert "verl_profiler_conf" in cfg.hydra.callbacks
    settings = validate(cfg)
    assert settings is not None
    assert settings.windows == (TokenWindow(20, 80),)
    assert plain(OmegaConf.select(cfg, f"{path}.iterations")) == COUNTERS


def test_nodes_are_found_in_lists_and_at_the_root_and_references_count_once(composed: Compose) -> None:
    node = composed("+profiler=torch_window").profiler
    cfg = OmegaConf.create({"a": [{"b": node}], "c": "${a.0.b}", "d": None, "e": "???", "f": {"g": "${a}"}})
    assert [found.path for found in find_windows(cfg)] == ["a[0].b"]
    alone = OmegaConf.structured(TorchWindow)
    assert [found.path for found in find_windows(alone)] == [""]
    alone.profile_token_end = 0
    with pytest.raises(ConfigError, match=r"^profile_token_end=0: "):
        validate(alone)


def test_without_a_node_there_is_nothing_to_validate(composed: Compose) -> None:
    assert validate(composed()) is None
    assert validate(composed("+profiler=none")) is None
    assert validate(composed(name="with_null")) is None


# -- rules, through the composed config --------------------------------------------------------------------------------


def refusal(cfg: DictConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        validate(cfg)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["profiler.profile_token_start=-1"], "profiler.profile_token_start=-1: must be an integer from 0"),
        (["profiler.profile_token_start=3000000000"], "profiler.profile_token_start=3000000000: must be an integer"),
        (["profiler.profile_token_end=0"], "profiler.profile_token_end=0: an empty window"),
        (["profiler.profile_token_windows=[[0,20],[10,30]]"], "profiler.profile_token_windows=[[0, 20], [10, 30]]: "),
        (
            ["profiler.profile_token_windows=[[0]]"],
            "profiler.profile_token_windows[0]=[0]: a list of [start, end] pairs",
        ),
        (["profiler.device=cpu", "profiler.contents=[npu]"], "profiler.contents=['npu']: npu cannot be recorded"),
        (["profiler.ranks=[-1]"], "profiler.ranks=[-1]: must be a list of ranks"),
        (["profiler.engine.name=vllm", "profiler.engine.version=0.30"], "profiler.engine.version=0.3: must be text"),
        (["profiler.save_path=???"], "profiler.save_path='???': cannot be resolved: "),
        (["profiler.engine.prompt_tokens=0"], "profiler.engine.prompt_tokens=0: must be an integer from 1"),
        (["profiler.enable=false", "profiler.track=me"], "profiler.track='me': must be one of lead, any, all"),
    ],
)
def test_refused_with_the_full_key(composed: Compose, overrides: list[str], message: str) -> None:
    assert refusal(composed("+profiler=torch_window", *overrides)).startswith(message)


# -- types, which OmegaConf checks when the config is composed ---------------------------------------------------------

TYPES: dict[str, tuple[type, bool]] = {
    "enable": (bool, False),
    "device": (str, False),
    "profile_token_start": (int, True),
    "profile_token_end": (int, True),
    "track": (str, False),
    "max_iterations": (int, True),
    "max_captures": (int, True),
    "skip_captures": (int, False),
    "part_iterations": (int, False),
    "arm": (str, False),
    "mapping": (str, False),
    "all_ranks": (bool, False),
    "save_path": (str, True),
    "on_error": (str, False),
    "engine.name": (str, False),
    "engine.prompt_tokens": (int, True),
    "engine.max_num_batched_tokens": (int, True),
    "engine.num_speculative_tokens": (int, True),
    "iterations.vllm.delay_iterations": (int, True),
    "iterations.sglang.num_steps": (int, True),
}
"""Field -> its type, and whether it may be null."""


@pytest.mark.parametrize(("key", "kind"), TYPES.items())
def test_schema_says_its_types(composed: Compose, key: str, kind: tuple[type, bool]) -> None:
    *above, last = f"profiler.{key}".split(".")
    node = OmegaConf.select(composed("+profiler=torch_window"), ".".join(above))._get_node(last)
    assert (node._metadata.ref_type, node._is_optional()) == kind


@pytest.mark.parametrize("path", ["profiler", "train.prof"])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("profile_token_start=true", "Value 'True' of type 'bool' could not be converted to Integer"),
        ("profile_token_start=3.0", "Value '3.0' of type 'float' could not be converted to Integer"),
        ("profile_token_end=1e3", "Value '1000.0' of type 'float' could not be converted to Integer"),
        ("profile_token_end=30:60", "Value '30:60' of type 'str' could not be converted to Integer"),
        ("profile_token_end='0x10'", "Value '0x10' of type 'str' could not be converted to Integer"),
        ("profile_token_windows=20", "Invalid value assigned: int is not a ListConfig"),
        ("ranks=0", "Invalid value assigned: int is not a ListConfig"),
        ("contents=cpu", "Invalid value assigned: str is not a ListConfig"),
        ("enable=yes_please", "Value 'yes_please' is not a valid bool"),
        ("steps=[true]", "Value 'True' of type 'bool' could not be converted to Integer"),
        ("steps=2", "Invalid value assigned: int is not a ListConfig"),
    ],
)
def test_wrong_type_does_not_compose(composed: Compose, path: str, override: str, said: str) -> None:
    option = "verl_torch_window" if override.startswith("steps") else "torch_window"
    with pytest.raises(ConfigCompositionException) as refused:
        composed(f"+profiler@{path}={option}", f"{path}.{override}")
    assert said in str(refused.value.__cause__)
    assert f"full_key: {path}.{override.partition('=')[0]}" in str(refused.value.__cause__)


@pytest.mark.parametrize("windows", ["[20]", "[[0,true]]", "[[0,1.5]]", "[[0,x]]"])
def test_wrong_type_in_a_pair_is_refused(composed: Compose, windows: str) -> None:
    """By OmegaConf 2.4 when it composes. OmegaConf 2.3 does not check the elements of an inner list that it merges."""
    with pytest.raises((ConfigCompositionException, ConfigError)):
        validate(composed("+profiler=torch_window", f"profiler.profile_token_windows={windows}"))


def test_references_in_pairs(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENS", "20")
    windows = "profiler.profile_token_windows=[[0,'${oc.env:TOKENS}'],['${data.max_response_length}',null]]"
    cfg = composed("+profiler=torch_window", windows)
    settings = validate(cfg)
    assert settings is not None
    assert settings.windows == (TokenWindow(0, 20), TokenWindow(64, None))
    monkeypatch.setenv("TOKENS", "twenty")
    assert refusal(cfg).startswith("profiler.profile_token_windows")


def test_wrong_type_is_refused_at_once_without_hydra() -> None:
    cfg = OmegaConf.create({"prof": OmegaConf.structured(TorchWindow)})
    with pytest.raises(ValidationError, match="could not be converted to Integer"):
        cfg.prof.profile_token_end = "x"  # noqa: S105 - a token, not a password


@pytest.mark.parametrize(
    ("value", "window"),
    [("'12'", 12), ("' 12 '", 12), ("1_000", 1000), ("${oc.env:TOKENS}", 80), ("${data.text_number}", 64)],
)
def test_integer_in_text_is_one(
    composed: Compose, monkeypatch: pytest.MonkeyPatch, value: str, window: int, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("TOKENS", "80")
    more = ["profiler.profile_token_windows=[]", "+data.text_number='64'"]
    settings = validate(composed("+profiler=torch_window", f"profiler.profile_token_end={value}", *more))
    assert settings is not None
    assert settings.windows == (TokenWindow(0, window),)
    assert not [warning for warning in recwarn if "verl_profiler_conf" in warning.filename]


def test_references_in_lists_take_the_lists_type(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_TO_CAPTURE", "3")
    references = [
        "profiler.ranks=[0,'${oc.env:RANK_TO_CAPTURE}']",
        "profiler.profile_token_windows=[['${data.max_response_length}',null]]",
    ]
    cfg = composed("+profiler=torch_window", *references)
    settings = validate(cfg)
    assert settings is not None
    assert (settings.ranks, settings.windows) == ((0, 3), (TokenWindow(64, None),))
    cfg.profiler.ranks = ["${data.text}"]
    assert "cannot be resolved: " in refusal(cfg)


def test_window_from_elsewhere_in_the_config(composed: Compose) -> None:
    cfg = composed("+profiler=torch_window", "profiler.profile_token_end=${data.max_response_length}")
    settings = validate(cfg)
    assert settings is not None
    assert settings.windows == (TokenWindow(0, 64),)
    cfg.data.max_response_length = "sixty-four"
    assert refusal(cfg) == (
        "profiler.profile_token_end='${data.max_response_length}': cannot be resolved: While dereferencing"
        " interpolation '${data.max_response_length}': Value 'sixty-four' of type 'str' could not be converted to"
        " Integer"
    )


def test_reference_to_nothing_is_refused_with_the_full_key(composed: Compose) -> None:
    cfg = composed("+profiler@train.prof=torch_window", "train.prof.profile_token_end=${data.max_length}")
    assert refusal(cfg) == (
        "train.prof.profile_token_end='${data.max_length}': cannot be resolved:"
        " Interpolation key 'data.max_length' not found"
    )


def test_reference_that_goes_round_in_circles_is_refused(composed: Compose) -> None:
    cfg = composed(
        "+profiler=torch_window",
        "profiler.profile_token_start=${profiler.profile_token_end}",
        "profiler.profile_token_end=${profiler.profile_token_start}",
    )
    assert refusal(cfg).startswith("profiler.profile_token_start='${profiler.profile_token_end}': cannot be resolved")


def test_unknown_fields_do_not_compose(composed: Compose) -> None:
    with pytest.raises(Exception, match="profile_token_stop"):
        composed("+profiler=torch_window", "profiler.profile_token_stop=3")


def test_none_takes_the_settings_of_every_option(composed: Compose) -> None:
    overrides = ["profiler.level=level1", "profiler.contents=[npu]", "profiler.device=cuda", *WINDOW]
    cfg = composed("+profiler=none", *overrides)
    assert validate(cfg) is None
    assert plain(cfg.profiler.iterations) == COUNTERS


# -- the counters, computed --------------------------------------------------------------------------------------------


def test_counters_follow_the_engines_version_and_prompt(composed: Compose) -> None:
    facts = ["profiler.engine.name=vllm", "profiler.engine.version=0.32.0", "profiler.engine.prompt_tokens=600"]
    cfg = composed("+profiler=torch_window", *WINDOW, *facts, "profiler.engine.max_num_batched_tokens=64")
    assert cfg.profiler.iterations.vllm.delay_iterations == 30  # 10 prefill iterations, the last makes token 0
    cfg.profiler.engine.version = "0.11.0"
    assert cfg.profiler.iterations.vllm.delay_iterations is None  # has no such counter


def test_counters_cannot_hold_two_windows(composed: Compose) -> None:
    cfg = composed("+profiler=torch_window", "profiler.profile_token_windows=[[0,4],[100,104]]")
    assert plain(cfg.profiler.iterations.vllm) == {"delay_iterations": None, "max_iterations": None}


@pytest.mark.parametrize("path", ["profiler", "train.prof"])
def test_resolving_refuses_what_a_job_would_refuse(composed: Compose, path: str) -> None:
    cfg = composed(f"+profiler@{path}=torch_window", f"{path}.profile_token_start=20", f"{path}.profile_token_end=5")
    message = f"{path}.profile_token_end=5: an empty window; must be greater than {path}.profile_token_start=20"
    with pytest.raises(InterpolationResolutionError) as refused:
        OmegaConf.resolve(cfg)
    assert message in str(refused.value)
    assert refusal(cfg) == message


def test_counters_cannot_be_set_by_hand(composed: Compose) -> None:
    cfg = composed("+profiler=torch_window", *WINDOW, "profiler.iterations.vllm.delay_iterations=20")
    assert refusal(cfg) == (
        "profiler.iterations.vllm.delay_iterations=20: is computed from the window and cannot be set"
    )


def test_config_that_was_resolved_is_still_valid(composed: Compose) -> None:
    cfg = composed("+profiler=torch_window", *WINDOW)
    before = validate(cfg)
    OmegaConf.resolve(cfg)
    assert validate(cfg) == before


# -- other processes ---------------------------------------------------------------------------------------------------

UNPICKLE = """
import json, pickle, sys
from omegaconf import OmegaConf
cfg = pickle.load(open(sys.argv[1], "rb"))
print(json.dumps(OmegaConf.to_container(cfg, resolve=True)))
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("path", ["profiler", "train.prof"])
def test_pickled_config_resolves_in_a_fresh_process(composed: Compose, tmp_path: Path, path: str) -> None:
    """As verl does with a Ray actor: no Hydra there, nobody imports us, and the typed node brings its resolvers."""
    cfg = composed(f"+profiler@{path}=torch_window", f"{path}.profile_token_start=20", f"{path}.profile_token_end=80")
    (tmp_path / "cfg.pickle").write_bytes(pickle.dumps(cfg))
    done = subprocess.run(
        [sys.executable, "-c", UNPICKLE, str(tmp_path / "cfg.pickle")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert OmegaConf.select(OmegaConf.create(json.loads(first)), f"{path}.iterations") == COUNTERS
    assert second == "False"
    assert done.stderr == ""


def test_schema_works_without_a_hydra_run() -> None:
    cfg = OmegaConf.create({"prof": OmegaConf.structured(TorchWindow(profile_token_start=20, profile_token_end=80))})
    assert plain(cfg.prof.iterations) == COUNTERS
    assert validate(cfg) == Settings(windows=(TokenWindow(20, 80),), engine={"name": "auto", "version": "auto"})


TWICE = """
import importlib, warnings
warnings.simplefilter("error")
import hydra_plugins.verl_profiler_conf as plugin
import verl_profiler_conf.launch.stand_ins as stand_ins
importlib.reload(plugin)
stand_ins.register()
from hydra import compose, initialize
from omegaconf import OmegaConf
{initialize}
cfg = compose(overrides=["+profiler=torch_window", "profiler.profile_token_end=8"])
assert plugin.registration_error is None
print(cfg.profiler.iterations.vllm.max_iterations)
"""


def test_plugin_module_run_again(tmp_path: Path) -> None:
    """Hydra 1.3 runs it for each start, also when it has been imported. No warning of OmegaConf's on the way."""
    code = TWICE.replace("{initialize}", "warnings.resetwarnings(); initialize(version_base=None, config_path=None)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
