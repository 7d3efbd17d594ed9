"""Apps that have a node `profiler` of their own, or values for ours: nobody's values are lost in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra_app import Run
from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf import ConfigError, validate
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.schema.options import TorchWindow

Compose = Callable[..., DictConfig]

FILES = {
    "unknown": "profiler: {kind: simple, every: 3}\nlr: 1\n",
    "known": "profiler: {enable: false, ranks: [7]}\nlr: 1\n",
    "prefix": "profiler: {enable: false}\nlr: 1\n",
    "text": "profiler: simple\nlr: 1\n",
    "false": "profiler: false\nlr: 1\n",
    "reference": "profiler: ${lr}\nlr: 1\n",
    "missing": "profiler: ???\nlr: 1\n",
    "nothing": "profiler: null\nlr: 1\n",
    "group": "defaults:\n- profiler: simple\n- _self_\nlr: 1\n",
    "included": "defaults:\n- parts/known\n- _self_\nlr: 1\n",
    "parts/known": "# @package _global_\nprofiler: {enable: false}\n",
    "placed": "defaults:\n- parts/values@profiler\n- _self_\nlr: 1\n",
    "parts/values": "enable: false\n",
    "below": "defaults:\n- parts/values@profiler.engine\n- _self_\nlr: 1\n",
    "early": "defaults:\n- profiler: torch_window\n- _self_\nprofiler: {track: any, profile_token_end: 8}\nlr: 1\n",
    "late": "defaults:\n- _self_\n- profiler: torch_window\nprofiler: {track: any, profile_token_end: 8}\nlr: 1\n",
    "early_without_values": "defaults:\n- profiler: torch_window\n- _self_\nlr: 1\n",
    "late_without_values": "defaults:\n- _self_\n- profiler: torch_window\nlr: 1\n",
    "experiments": "defaults:\n- _self_\n- experiment: null\nlr: 1\n",
    "experiment/with_window": (
        "# @package _global_\ndefaults:\n- /profiler: torch_window\n- _self_\nprofiler: {profile_token_end: 5}\n"
    ),
    "experiment/without_order": (
        "# @package _global_\ndefaults:\n- _self_\n- /profiler: torch_window\nprofiler: {profile_token_end: 5}\n"
    ),
    "profiler/simple": "kind: simple\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("conf")
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / f"{name}.yaml").write_text(text)
    return root


@pytest.fixture
def composed(folder: Path) -> Iterator[Compose]:
    with initialize_config_dir(str(folder), version_base=None):

        def make(name: str, *overrides: str, return_hydra_config: bool = True) -> DictConfig:
            return compose(name, list(overrides), return_hydra_config=return_hydra_config)

        yield make
    GlobalHydra.instance().clear()


def refusal(config: DictConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        validate(config)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "keys", "source"),
    [
        ("unknown", ["kind", "every"], "unknown"),
        ("known", ["enable", "ranks"], "known"),
        ("prefix", ["enable"], "prefix"),
        ("included", ["enable"], "parts/known"),
        ("placed", ["enable"], "parts/values"),
        ("below", ["engine"], "parts/values"),
    ],
)
def test_keys_of_the_apps_own_are_not_taken_over(composed: Compose, name: str, keys: list[str], source: str) -> None:
    told = refusal(composed(name, "+profiler=torch_window", "profiler.profile_token_end=8"))
    assert told.startswith(f"profiler={keys}: the config {source!r} has these keys, and torch_window has replaced ")
    assert "(+profiler@window=torch_window window.profile_token_start=...)" in told


@pytest.mark.parametrize("name", ["unknown", "known", "prefix", "text", "false", "nothing", "group", "included"])
def test_the_window_takes_another_place(composed: Compose, name: str) -> None:
    without = OmegaConf.to_container(composed(name, return_hydra_config=False))
    config = composed(name, "+profiler@window=torch_window", "window.profile_token_start=20")
    assert OmegaConf.get_type(config, "window") is TorchWindow
    settings = validate(config)
    assert settings is not None
    assert settings.windows == (TokenWindow(20, None),)
    rest = OmegaConf.masked_copy(config, [key for key in config if key not in ("hydra", "window")])
    assert OmegaConf.to_container(rest) == without


def test_a_group_of_the_apps_own_is_not_added_to(composed: Compose) -> None:
    with pytest.raises(Exception, match="Multiple values for profiler"):
        composed("group", "+profiler=torch_window")


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("text", "profiler", "'simple'"),
        ("false", "profiler", "False"),
        ("reference", "profiler", "'${lr}'"),
        ("text", "lr", "1"),
    ],
)
def test_a_value_of_the_apps_own_is_not_taken_over(composed: Compose, name: str, place: str, value: str) -> None:
    """As Lightning's `profiler: simple`, which would become a node without a word."""
    told = refusal(composed(name, f"+profiler@{place}=torch_window", f"{place}.profile_token_end=8"))
    assert told == (
        f"{place}={value}: the config {name!r} has this value, and torch_window has replaced it; put the window"
        " elsewhere (+profiler@window=torch_window window.profile_token_start=...), or make it null there"
    )


@pytest.mark.parametrize("name", ["nothing", "early", "group"])
def test_fields_among_the_apps_own_keys_are_refused(composed: Compose, name: str) -> None:
    told = refusal(composed(name, "+profiler@_global_=torch_window", "profile_token_end=8"))
    assert told.startswith("profiler@_global_='torch_window': puts the option's fields among the app's own keys (")
    assert told.endswith("give it a node of its own, as in +profiler=torch_window or +profiler@window=torch_window")


@pytest.mark.parametrize("name", ["missing", "nothing", "experiments"])
def test_where_nothing_is_lost_nothing_is_refused(composed: Compose, name: str) -> None:
    settings = validate(composed(name, "+profiler=torch_window", "profiler.profile_token_end=8"))
    assert settings is not None
    assert settings.windows == (TokenWindow(0, 8),)


@pytest.mark.parametrize("name", ["early", "early_without_values", "late_without_values"])
def test_an_option_in_the_apps_defaults_list(composed: Compose, name: str) -> None:
    assert validate(composed(name, "profiler.profile_token_end=8")) is not None


def test_values_that_the_option_is_listed_after_are_refused(composed: Compose) -> None:
    told = refusal(composed("late"))
    assert told.startswith("profiler=['track', 'profile_token_end']: the config 'late' has these keys")
    assert told.endswith("list it before _self_ in the defaults list of 'late'")


def test_an_option_that_is_selected_twice_loses_the_apps_values(composed: Compose) -> None:
    told = refusal(composed("early", "+profiler=torch_window"))
    assert told == (
        "profiler=['track', 'profile_token_end']: the config 'early' has these keys for the option that its defaults"
        " list selects, and selected a second time, torch_window has replaced their values with its defaults: leave out"
        " +profiler=torch_window"
    )
    assert validate(composed("early_without_values", "+profiler=torch_window")) is not None  # nothing is lost


def test_an_experiment_that_selects_the_option(composed: Compose) -> None:
    settings = validate(composed("experiments", "experiment=with_window"))
    assert settings is not None
    assert settings.windows == (TokenWindow(0, 5),)
    told = refusal(composed("experiments", "experiment=without_order"))
    assert told.startswith("profiler=['profile_token_end']: the config 'experiment/without_order' has these keys")


@pytest.mark.parametrize(
    "override", ["+data={dir: a, file: '${.dir}/b'}", "+data.file=${.dir}", "lr='${oc.env:NO_SUCH}'"]
)
def test_an_override_of_the_apps_own_is_read_as_it_is_written(composed: Compose, override: str) -> None:
    """Its interpolation leads from the place that it is set at; the list of overrides is another place."""
    config = composed("experiments", "+profiler=torch_window", "profiler.profile_token_end=8", override)
    settings = validate(config)
    assert settings is not None
    assert [window.end for window in settings.windows] == [8]


def test_an_interpolation_that_leads_nowhere_names_its_key(composed: Compose) -> None:
    assert refusal(composed("experiments", "+profiler=torch_window", "profiler.profile_token_end=${data.none}")) == (
        "profiler.profile_token_end='${data.none}': cannot be resolved: Interpolation key 'data.none' not found"
    )


def test_a_search_path_of_the_launch(composed: Compose, tmp_path: Path) -> None:
    """A config that only `hydra.searchpath` makes known counts as well."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "theirs.yaml").write_text("enable: false\n")
    places = [f"hydra.searchpath=[file://{tmp_path}]", "+more@profiler=theirs"]
    assert refusal(composed("experiments", *places, "+profiler=torch_window")).startswith("profiler=['enable']: ")


@pytest.mark.parametrize("name", ["unknown", "known", "prefix", "included", "placed"])
def test_without_hydras_own_node_the_order_of_the_keys_tells(composed: Compose, name: str) -> None:
    """What a launcher that calls `compose` hands over."""
    config = composed(name, "+profiler=torch_window", return_hydra_config=False)
    assert ": these keys were there before the option, and torch_window has replaced " in refusal(config)


def test_a_loader_that_is_not_known_leaves_the_order_of_the_keys(
    composed: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed("prefix", "+profiler=torch_window")
    monkeypatch.delattr("hydra._internal.config_loader_impl.ConfigLoaderImpl._parse_overrides_and_create_caching_repo")
    assert refusal(config).startswith("profiler=['enable']: these keys were there before the option")


def test_a_job_is_stopped_before_it_starts(app: Callable[..., Run], folder: Path) -> None:
    place = (f"--config-dir={folder}", "--config-name=prefix")
    run = app(*place, "+profiler=torch_window", "profiler.profile_token_end=8")
    assert (run.code, run.tasks) == (1, [])
    assert run.err.splitlines()[-1].startswith("profiler=['enable']: the config 'prefix' has these keys")
    run = app(*place, "+profiler@window=torch_window", "window.profile_token_end=8", "+tokens=0")
    assert run.code == 0, run.err
    assert run.tasks[0]["cfg"]["profiler"] == {"enable": False}


def test_the_options_name_cannot_be_set(composed: Compose) -> None:
    config = composed("experiments", "+profiler=torch_window", "profiler.option=npu_window")
    assert refusal(config) == (
        "profiler.option='npu_window': cannot be set; to use another option, select profiler=npu_window"
    )


def test_a_node_that_lost_its_type_is_known_by_its_option(composed: Compose) -> None:
    """Through YAML, or a plain container: what a launcher may make of a config before it hands it over."""
    overrides = ("+profiler@train.prof=npu_window", "train.prof.profile_token_end=8", "train.prof.level=level1")
    config = composed("experiments", *overrides, return_hydra_config=False)
    settings = validate(config)
    assert settings is not None
    assert settings.option == "npu_window"
    plain: Any = OmegaConf.to_container(config)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    for read in (OmegaConf.create(OmegaConf.to_yaml(config)), OmegaConf.create(plain), OmegaConf.create(resolved)):
        assert OmegaConf.get_type(read.train.prof) is dict
        assert validate(read) == settings
    assert OmegaConf.create(plain).train.prof.iterations.vllm.max_iterations == 8
