"""The verl presets on verl's own configs, as its released wheels hold them: composed, resolved, refused."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
from clone import CLONE, python_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.launch.checking import validate
from verl_profiler_conf.launch.job import activate
from verl_profiler_conf.launch.stand_ins import register
from verl_profiler_conf.tools import cli
from verl_profiler_conf.verl.preset import launch_config, resolver
from verl_profiler_conf.verl.preset.facts import parse_version
from verl_profiler_conf.verl.preset.keys import key_table
from verl_profiler_conf.verl.ray_env import JOB_CONFIG

VERSIONS = ["0.8.0", "0.9.0", "0.9.1"]
ENGINES = ["dp", "megatron", "veomni", "torchtitan"]
TRAINERS = [("ppo_trainer", (f"model_engine={engine}",)) for engine in ENGINES] + [("ppo_megatron_trainer", ())]
EXPERIMENTAL = ["fully_async_policy", "one_step_off_policy"]

WINDOW = ("profiler.profile_token_start=20", "profiler.profile_token_end=30")
VLLM = ("actor_rollout_ref.rollout.name=vllm", "profiler.engine.name=vllm", "profiler.engine.version=0.32.0")
SGLANG = ("actor_rollout_ref.rollout.name=sglang", "profiler.engine.name=sglang", "profiler.engine.version=0.5.14")
PRESET = ("+profiler=verl_torch_window", *WINDOW, *VLLM)
ROLLOUT = "actor_rollout_ref.rollout.profiler"

pytestmark = pytest.mark.one_python

Compose = Callable[..., DictConfig]


@pytest.fixture
def using(verl_package: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Compose]]:
    """Version of verl -> how to compose its configs, as where that verl is installed."""
    monkeypatch.delenv(ENV_NAME, raising=False)
    monkeypatch.delenv(JOB_CONFIG, raising=False)

    def install(version: str) -> Compose:
        root = verl_package(version)
        monkeypatch.syspath_prepend(str(root))
        _registered_anew()
        assert launch_config.installed_verl() == version

        def compose(*overrides: str, name: str = "ppo_trainer", folder: str = "trainer") -> DictConfig:
            GlobalHydra.instance().clear()
            more = () if folder == "trainer" else (f"hydra.searchpath=[file://{root}/verl/trainer/config]",)
            with hydra.initialize_config_dir(str(root / "verl" / folder / "config"), version_base=None):
                return hydra.compose(name, [*overrides, *more])

        return compose

    yield install
    monkeypatch.undo()
    _registered_anew()


def _registered_anew() -> None:
    HydraConfig.instance().cfg = None  # of a launch that another test has composed in this process
    launch_config.installed_verl.cache_clear()
    resolver._warn_cut_off.cache_clear()
    register()


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted path -> plain value."""
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)
    if not isinstance(config, dict) or not config:
        return {prefix[:-1]: config}
    return {path: value for key, below in config.items() for path, value in flat(below, f"{prefix}{key}.").items()}


def without_preset(config: DictConfig) -> dict[str, Any]:
    return {path: value for path, value in flat(config).items() if not path.startswith("profiler.")}


class TestEveryTrainer:
    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize(("name", "engine"), TRAINERS, ids=lambda value: "-".join(value) if value else "")
    def test_only_the_keys_of_the_table_change(
        self, version: str, name: str, engine: tuple[str, ...], using: Callable[[str], Compose]
    ) -> None:
        compose = using(version)
        plain = flat(compose(*engine, VLLM[0], name=name))
        preset = without_preset(compose(*engine, *PRESET, name=name))
        table = {key.path for key in key_table("torch", parse_version(version)).values()}
        assert table <= set(plain), "the preset may add no key that verl does not know"
        assert set(preset) == set(plain)
        inherit = {
            path for path in plain if path.startswith((f"{ROLLOUT}.", "critic.profiler.")) or ".profiler." in path
        }
        changed = {path for path in plain if preset[path] != plain[path]}
        assert changed <= table | inherit
        expected = {
            "global_profiler.tool": "torch",
            "global_profiler.steps": [2],
            "global_profiler.save_path": "outputs/profile",
            f"{ROLLOUT}.tool": "torch",
            f"{ROLLOUT}.enable": True,
            f"{ROLLOUT}.ranks": [0],
            f"{ROLLOUT}.all_ranks": False,
            f"{ROLLOUT}.tool_config.torch.discrete": True,
            "actor_rollout_ref.actor.profiler.enable": False,
            "actor_rollout_ref.ref.profiler.enable": False,
            "critic.profiler.enable": False,
        }
        if version != "0.8.0":  # which has no token window, and ends at a key that it does not know
            # vLLM starts one iteration before its delay is over
            expected[f"{ROLLOUT}.tool_config.torch.profile_token_start"] = 21
            expected[f"{ROLLOUT}.tool_config.torch.profile_token_end"] = 31
        assert {path: preset[path] for path in expected} == expected

    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("preset", ["verl_torch_window", "verl_npu_window"])
    @pytest.mark.parametrize(("name", "engine"), TRAINERS, ids=lambda value: "-".join(value) if value else "")
    def test_disabled_it_changes_nothing(
        self, version: str, preset: str, name: str, engine: tuple[str, ...], using: Callable[[str], Compose]
    ) -> None:
        compose = using(version)
        # what the rollout inherits, it inherits still
        mine = ("actor_rollout_ref.actor.profiler.tool_config.npu.discrete=true",)
        plain = flat(compose(*engine, *mine, name=name))
        off = compose(*engine, *mine, f"+profiler={preset}", "profiler.enable=false", name=name)
        assert without_preset(off) == plain
        assert activate(off).settings is None

    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("folder", EXPERIMENTAL)
    def test_asynchronous_trainers(self, version: str, folder: str, using: Callable[[str], Compose]) -> None:
        prefix = folder.removesuffix("_policy")
        config = using(version)(*PRESET, name=f"{prefix}_ppo_trainer", folder=f"experimental/{folder}")
        settings = validate(config)
        assert settings is not None
        assert settings.arm == "request"
        assert config.global_profiler.steps == [2]

    def test_every_trainer_of_the_wheel_is_here(self, verl_package: Callable[[str], Path]) -> None:
        configs = verl_package("0.9.1") / "verl" / "trainer" / "config"
        trainers = {path.stem for path in configs.glob("*trainer*.yaml") if not path.stem.startswith("_")}
        assert trainers == {name for name, _ in TRAINERS} | {"sft_trainer_engine"}
        assert {path.stem for path in (configs / "model_engine").glob("*.yaml")} == set(ENGINES)

    def test_the_committed_reference(self, using: Callable[[str], Compose], capsys: pytest.CaptureFixture[str]) -> None:
        using("0.9.1")
        status = cli.main(
            ["generate", "--check", str(CLONE / "verl_profiler_conf" / "tools" / "generate" / "verl.yaml")]
        )
        assert status == 0, capsys.readouterr().out

    @pytest.mark.parametrize("version", VERSIONS)
    def test_nothing_in_it_needs_the_launching_process(self, version: str, using: Callable[[str], Compose]) -> None:
        written = OmegaConf.to_yaml(using(version)(*PRESET))
        assert "${verl_profiler_conf.verl:steps}" in written
        assert "${hydra:" not in written

    @pytest.mark.parametrize("version", VERSIONS)
    def test_npu(self, version: str, using: Callable[[str], Compose]) -> None:
        ascend = ("profiler.contents=[npu,cpu]", "profiler.level=level1", "profiler.analysis=true")
        config = using(version)("+profiler=verl_npu_window", *WINDOW, *VLLM, *ascend)
        found = config.actor_rollout_ref.rollout.profiler
        assert (found.tool, found.enable, config.global_profiler.tool) == ("npu", True, "npu")
        tool = found.tool_config.npu
        assert (tool.discrete, tool.contents, tool.level, tool.analysis) == (True, ["npu", "cpu"], "level1", True)
        assert validate(config).option == "npu_window"  # type: ignore[union-attr]


class TestSft:
    """Nothing responds in supervised training. Its config has a `profiler` node of verl's own."""

    @pytest.mark.parametrize("version", VERSIONS)
    def test_the_preset_is_refused(self, version: str, using: Callable[[str], Compose]) -> None:
        config = using(version)("profiler=verl_torch_window", *WINDOW, name="sft_trainer_engine")
        with pytest.raises(
            ConfigError,
            match=r"profiler='verl_torch_window': is for verl's RL trainers.*; anywhere else use torch_window",
        ):
            validate(config)
        beside = using(version)("+profiler@window=verl_torch_window", name="sft_trainer_engine")
        with pytest.raises(ConfigError, match="window='verl_torch_window': is for verl's RL trainers"):
            validate(beside)

    @pytest.mark.parametrize("version", VERSIONS)
    def test_the_generic_option_takes_a_node_of_its_own(self, version: str, using: Callable[[str], Compose]) -> None:
        compose = using(version)
        plain = flat(compose(name="sft_trainer_engine"))
        overrides = ("+profiler@window=torch_window", "window.profile_token_end=4")
        config = compose(*overrides, name="sft_trainer_engine")
        assert {path: value for path, value in flat(config).items() if not path.startswith("window.")} == plain
        assert validate(config) is not None


class TestRefused:
    @pytest.mark.parametrize(
        ("override", "both"),
        [
            (
                f"{ROLLOUT}.tool_config.torch.profile_token_start=20",  # case conflict
                (f"{ROLLOUT}.tool_config.torch.profile_token_start=20", "profiler.profile_token_start"),
            ),
            (
                f"{ROLLOUT}.tool_config.torch.profile_token_end=null",
                (f"{ROLLOUT}.tool_config.torch.profile_token_end=None", "profiler.profile_token_end"),
            ),
            ("global_profiler.steps=[1,3]", ("global_profiler.steps=[1, 3]", "profiler.steps")),
            ("global_profiler.tool=nsys", ("global_profiler.tool='nsys'", "profiler,", "'torch'")),
            ("global_profiler.save_path=/tmp/p", ("global_profiler.save_path='/tmp/p'", "profiler.save_path")),
            ("global_profiler.profile_continuous_steps=true", ("profile_continuous_steps=True", "adjacent steps")),
            (f"{ROLLOUT}.enable=false", (f"{ROLLOUT}.enable=False", "profiler.roles")),
            (f"{ROLLOUT}.ranks=[1]", (f"{ROLLOUT}.ranks=[1]", "profiler.ranks")),
            (f"{ROLLOUT}.all_ranks=true", (f"{ROLLOUT}.all_ranks=True", "profiler.all_ranks")),
            (f"{ROLLOUT}.tool_config.torch.discrete=false", ("discrete=False", "never starts")),
            (f"{ROLLOUT}.tool_config.torch.contents=[stack]", ("contents=['stack']", "profiler.contents")),
            ("actor_rollout_ref.actor.profiler.enable=true", ("actor.profiler.enable=True", "profiler.roles")),
            ("critic.profiler.enable=true", ("critic.profiler.enable=True", "profiler.roles")),
            (
                f"+ray_kwargs.ray_init.runtime_env.env_vars.{ENV_NAME}=x",
                (f"env_vars.{ENV_NAME}='x'", "set by the preset from profiler"),
            ),
            ("actor_rollout_ref.rollout.name=trtllm", ("rollout.name='trtllm'", "vllm or sglang")),
            ("profiler.steps=[]", ("profiler.steps=[]", "integers from 1")),
            ("profiler.steps=[-1]", ("profiler.steps=[-1]", "integers from 1")),
            (
                "profiler.roles=[rollout,reward]",
                ("profiler.roles=['rollout', 'reward']", "rollout, actor, ref, critic"),
            ),
            ("profiler.roles=[actor]", ("profiler.roles=['actor']", "must name rollout")),
            ("profiler.profile_token_end=3", ("profiler.profile_token_end=3", "profiler.profile_token_start=20")),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_in_one_line_that_names_both(
        self, override: str, both: tuple[str, ...], using: Callable[[str], Compose]
    ) -> None:
        config = using("0.9.1")(*PRESET, override)
        with pytest.raises(ConfigError) as caught:
            validate(config)
        assert all(part in str(caught.value) for part in both), str(caught.value)
        assert "\n" not in str(caught.value)

    def test_all_at_once(self, using: Callable[[str], Compose]) -> None:
        config = using("0.9.1")(*PRESET, "global_profiler.steps=[1,3]", f"{ROLLOUT}.ranks=[3]")
        with pytest.raises(ConfigError) as caught:
            validate(config)
        first, *rest = str(caught.value).splitlines()
        assert first == "2 keys contradict the preset:"
        assert [line.partition("=")[0].strip() for line in rest] == ["global_profiler.steps", f"{ROLLOUT}.ranks"]

    @pytest.mark.parametrize("more", ["data.max_response_length=20", "actor_rollout_ref.rollout.max_model_len=21"])
    def test_a_window_that_no_response_gets_to(self, more: str, using: Callable[[str], Compose]) -> None:
        with pytest.raises(ConfigError, match=r"profile_token_start=20: no response gets there.* token is 19$"):
            validate(using("0.9.1")(*PRESET, more))

    def test_what_agrees_is_no_contradiction(self, using: Callable[[str], Compose]) -> None:
        same = (
            "global_profiler.steps=[1,3]",
            "profiler.steps=[3,1]",
            "global_profiler.tool=torch",
            f"{ROLLOUT}.enable=true",
        )
        assert validate(using("0.9.1")(*PRESET, *same)) is not None

    def test_a_verl_without_a_rollout_profiler(
        self, using: Callable[[str], Compose], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = using("0.9.1")(*PRESET)
        monkeypatch.setattr(launch_config, "installed_verl", lambda: "0.7.0")
        with pytest.raises(ConfigError, match=r"needs verl 0\.7\.1 or newer, and 0\.7\.0 is installed"):
            validate(config)


class TestWarned:
    @pytest.mark.parametrize(
        ("overrides", "told"),
        [
            (("profiler.steps=[0]",), "verl's first step is 1"),  # case step-zero
            (("profiler.steps=[2,9]", "trainer.total_training_steps=5"), "[9] will not be reached"),
        ],
    )
    def test_and_taken(
        self, overrides: tuple[str, ...], told: str, using: Callable[[str], Compose], caplog: pytest.LogCaptureFixture
    ) -> None:
        config = using("0.9.1")(*PRESET, *overrides)
        with caplog.at_level(logging.WARNING, "verl_profiler_conf"):
            assert validate(config) is not None
        assert len([record for record in caplog.records if told in record.message]) == 1

    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize(
        ("folder", "arm", "warns"),
        [
            ("one_step_off_policy", "request", True),
            ("one_step_off_policy", "job", False),
            ("fully_async_policy", "request", False),
        ],
    )
    def test_a_trainer_that_never_starts_the_profiler(
        self,
        version: str,
        folder: str,
        arm: str,
        warns: bool,
        using: Callable[[str], Compose],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        name = f"{folder.removesuffix('_policy')}_ppo_trainer"
        config = using(version)(*PRESET, f"profiler.arm={arm}", name=name, folder=f"experimental/{folder}")
        with caplog.at_level(logging.WARNING, "verl_profiler_conf"):
            assert validate(config) is not None
        assert ("never starts the rollout's profiler" in caplog.text) is warns

    @pytest.mark.parametrize(
        ("version", "more", "warns"),
        [
            ("0.8.0", (), False),
            ("0.9.0", (), True),
            ("0.9.0", ("trainer.use_v1=False",), False),
            ("0.9.0", ("profiler.arm=job",), False),
            ("0.9.1", (), False),
        ],
    )
    def test_nor_does_the_first_v1_trainer(
        self,
        version: str,
        more: tuple[str, ...],
        warns: bool,
        using: Callable[[str], Compose],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        config = using(version)(*PRESET, *more)
        with caplog.at_level(logging.WARNING, "verl_profiler_conf"):
            assert validate(config) is not None
        assert ("trainer.use_v1=True never starts the rollout's profiler" in caplog.text) is warns

    @pytest.mark.parametrize(("option", "enable", "lines"), [("torch", True, 1), ("torch", False, 0), ("npu", True, 1)])
    def test_a_generic_option_on_an_rl_trainer(
        self, option: str, enable: bool, lines: int, using: Callable[[str], Compose], caplog: pytest.LogCaptureFixture
    ) -> None:
        validate(using("0.9.1")(f"+profiler={option}_window", *WINDOW, f"profiler.enable={enable}"))
        hint = f"+profiler=verl_{option}_window captures in chosen RL steps"
        assert [hint in line for line in caplog.messages] == [True] * lines

    def test_the_plain_case_is_silent(self, using: Callable[[str], Compose], caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "verl_profiler_conf"):
            validate(using("0.9.1")(*PRESET))
        assert not caplog.records


class TestValues:
    @pytest.mark.parametrize(
        ("version", "ranks", "told", "engine"),
        [
            ("0.9.1", "[0]", [0], (0,)),
            ("0.9.1", "[5]", [5], (1,)),  # GPU 5 is the second of replica 2
            ("0.9.1", "[4,5]", [4, 5], (0, 1)),
            ("0.9.0", "[5]", [2], (1,)),  # before 0.9.1 verl takes indices of replicas
            ("0.8.0", "[4,5]", [2], (0, 1)),
        ],
    )
    def test_ranks_are_gpus_whatever_verl_takes(
        self, version: str, ranks: str, told: list[int], engine: tuple[int, ...], using: Callable[[str], Compose]
    ) -> None:
        tp = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
        config = using(version)(*PRESET, tp, f"profiler.ranks={ranks}")
        assert config.actor_rollout_ref.rollout.profiler.ranks == told
        assert validate(config).ranks == engine  # type: ignore[union-attr]

    def test_more_roles(self, using: Callable[[str], Compose]) -> None:
        config = using("0.9.1")(*PRESET, "profiler.roles=[rollout,actor]", "profiler.ranks=[1]")
        assert config.actor_rollout_ref.actor.profiler.enable is True
        assert config.actor_rollout_ref.actor.profiler.ranks == [1]
        assert config.actor_rollout_ref.ref.profiler.enable is False
        assert validate(config) is not None

    @pytest.mark.parametrize(
        ("overrides", "start", "end"),
        [
            (SGLANG, 21, 31),
            ((*VLLM, "profiler.profile_token_start=0"), None, 30),
            ((*VLLM, "profiler.profile_token_end=null"), 21, None),
            (
                (
                    *VLLM,
                    WINDOW[0][:-2] + "null",
                    WINDOW[1][:-2] + "null",
                    "profiler.profile_token_windows=[[0,4],[8,9]]",
                ),
                None,
                None,
            ),
        ],
    )
    def test_counters_of_the_engine_are_the_fallback(
        self, overrides: tuple[str, ...], start: int | None, end: int | None, using: Callable[[str], Compose]
    ) -> None:
        config = using("0.9.1")("+profiler=verl_torch_window", *WINDOW, *overrides)
        tool = config.actor_rollout_ref.rollout.profiler.tool_config.torch
        assert (tool.profile_token_start, tool.profile_token_end) == (start, end)
        assert validate(config) is not None

    def test_somewhere_else_in_the_config(self, using: Callable[[str], Compose]) -> None:
        config = using("0.9.1")("+profiler@my.window=verl_torch_window", "my.window.profile_token_end=30", VLLM[0])
        assert config.actor_rollout_ref.rollout.profiler.enable is True
        bad = using("0.9.1")(
            "+profiler@my.window=verl_torch_window", "my.window.profile_token_end=30", "global_profiler.steps=[7]"
        )
        with pytest.raises(ConfigError, match=r"contradicts my\.window\.steps"):
            validate(bad)
        assert validate(config) is not None

    def test_none_takes_the_presets_settings(self, using: Callable[[str], Compose]) -> None:
        compose = using("0.9.1")
        config = compose("+profiler=none", *WINDOW, "profiler.steps=[3]", "profiler.roles=[actor]")
        assert without_preset(config) == flat(compose())
        assert validate(config) is None


class TestJob:
    def test_published_to_a_ray_cluster_and_taken_back(
        self, using: Callable[[str], Compose], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = json.dumps({"runtime_env": {"working_dir": "gcs://x", "env_vars": {"A": "1"}}, "metadata": {"m": "n"}})
        monkeypatch.setenv(JOB_CONFIG, before)
        config = using("0.9.1")(*PRESET)
        with activate(config, run_dir=tmp_path):
            job = json.loads(os.environ[JOB_CONFIG])
            published = job["runtime_env"]["env_vars"].pop(ENV_NAME)
            assert job == json.loads(before)
            settings = Settings.from_json(published)
            assert (settings.arm, settings.save_path) == ("request", str(tmp_path / "profile"))
            assert settings.run_id
            # and what verl is told is where the captures go
            assert config.global_profiler.save_path == str(tmp_path / "profile")
        assert os.environ[JOB_CONFIG] == before
        assert ENV_NAME not in os.environ

    def test_only_the_presets_touch_rays_variable(self, using: Callable[[str], Compose], tmp_path: Path) -> None:
        with activate(using("0.9.1")("+profiler=torch_window", "profiler.profile_token_end=4"), run_dir=tmp_path):
            assert JOB_CONFIG not in os.environ

    def test_verl_gets_it_in_another_process(
        self, using: Callable[[str], Compose], verl_package: Callable[[str], Path], tmp_path: Path
    ) -> None:
        """As in verl's Ray actors: the whole config pickled, in a process that has seen no Hydra, resolved in place."""
        config = using("0.9.1")(*PRESET)
        (tmp_path / "config.pickle").write_bytes(pickle.dumps(config.actor_rollout_ref.rollout))
        code = (
            "import pickle, sys; from omegaconf import OmegaConf\n"
            "rollout = pickle.load(open(sys.argv[1], 'rb')); root = rollout._get_root(); OmegaConf.resolve(root)\n"
            "print(rollout.profiler.tool_config.torch.profile_token_start, root.global_profiler.steps,"
            " root.global_profiler.save_path)"
        )
        published = json.dumps({"profile_token_end": 30, "save_path": "/abs/profile"})
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "config.pickle")],
            env={**os.environ, "PYTHONPATH": python_path(CLONE, verl_package("0.9.1")), ENV_NAME: published},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "21 [2] /abs/profile\n"

    def test_a_part_cut_off_from_the_preset_profiles_nothing_and_says_so(
        self, using: Callable[[str], Compose], caplog: pytest.LogCaptureFixture
    ) -> None:
        config = using("0.9.1")(*PRESET)
        part = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref.rollout, resolve=False))
        with caplog.at_level(logging.WARNING, "verl_profiler_conf"):
            assert [part.profiler.enable for _ in range(3)] == [False] * 3
        assert len(caplog.records) == 1
