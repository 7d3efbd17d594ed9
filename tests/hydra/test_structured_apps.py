"""Apps whose config is a dataclass, as Hydra's own tutorial on structured configs teaches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, OmegaConf

from verl_profiler_conf import validate
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.schema.options import NpuWindow, TorchWindow

Compose = Callable[..., DictConfig]


@dataclass
class Database:
    host: str = "localhost"
    port: int = MISSING


@dataclass
class Counter:
    _target_: str = "collections.Counter"
    red: int = 2


@dataclass
class Trainer:
    lr: float = 0.1
    prof: Any = None


@dataclass
class App:
    """A primary config that knows nothing of a profiler."""

    n: int = 12
    counter: Counter = field(default_factory=Counter)


@dataclass
class Nested:
    """With a group of schemas below."""

    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"db": "of_test"}])
    db: Database = MISSING
    n: int = 12


@dataclass
class Prepared:
    """With a field for the option, here and below."""

    n: int = 12
    profiler: Any = None
    train: Trainer = field(default_factory=Trainer)


STRUCTURED = {"of_test_app": App, "of_test_nested": Nested, "of_test_prepared": Prepared, "of_test_base": App}
FILES = {
    # the schema comes first in the list, and the file's own values after it
    "of_test_schema_first": "defaults:\n- of_test_base\n- _self_\nn: 13\n",
    "of_test_schema_and_group": "defaults:\n- of_test_nested_base\n- db: of_test\n- _self_\nn: 13\ndb: {port: 3307}\n",
}
UNPREPARED = ("of_test_app", "of_test_nested", "of_test_schema_first", "of_test_schema_and_group")
WITHOUT_APPENDING = "hydra/callbacks=profiler"


@dataclass
class NestedBase:
    db: Database = MISSING
    n: int = 12


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Compose]:
    store = ConfigStore.instance()
    for name, kind in STRUCTURED.items():
        store.store(name=name, node=kind)
    store.store(name="of_test_nested_base", node=NestedBase)
    store.store(name="of_test", group="db", node=Database(port=3306))
    for name, text in FILES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with initialize_config_dir(str(tmp_path), version_base=None):
        yield lambda name, *overrides: compose(name, list(overrides))
    GlobalHydra.instance().clear()
    for name in (*STRUCTURED, "of_test_nested_base"):
        del store.repo[f"{name}.yaml"]
    del store.repo["db"]["of_test.yaml"]


@pytest.mark.parametrize("name", UNPREPARED)
def test_without_appending(composed: Compose, name: str) -> None:
    without = OmegaConf.to_container(composed(name))
    config = composed(name, WITHOUT_APPENDING, "profiler.profile_token_start=2", "profiler.profile_token_end=5")
    assert OmegaConf.get_type(config, "profiler") is TorchWindow
    settings = validate(config)
    assert settings is not None
    assert settings.windows == (TokenWindow(2, 5),)
    with_window: Any = OmegaConf.to_container(config)
    assert isinstance(without, dict)
    assert {key: value for key, value in with_window.items() if key != "profiler"} == {
        key: value for key, value in without.items() if key != "profiler"
    }
    chosen = composed(name, WITHOUT_APPENDING, "profiler=npu_window", "profiler.level=level1")
    assert OmegaConf.get_type(chosen, "profiler") is NpuWindow


@pytest.mark.parametrize("name", UNPREPARED)
@pytest.mark.parametrize("option", ["+profiler=torch_window", "+profiler@window=torch_window"])
def test_appending_does_not_compose(composed: Compose, name: str, option: str) -> None:
    """Hydra refuses a key that the dataclass does not have; the documentation says so."""
    with pytest.raises(Exception, match=r"Key '(profiler|window)' not in '(App|Nested|NestedBase)'"):
        composed(name, option)


@pytest.mark.parametrize("place", ["profiler", "train.prof"])
def test_a_field_for_the_option(composed: Compose, place: str) -> None:
    config = composed("of_test_prepared", f"+profiler@{place}=torch_window", f"{place}.profile_token_end=5")
    assert OmegaConf.get_type(OmegaConf.select(config, place)) is TorchWindow
    settings = validate(config)
    assert settings is not None
    assert settings.windows == (TokenWindow(0, 5),)


@pytest.mark.parametrize("name", UNPREPARED)
def test_the_apps_own_object_is_made_all_the_same(composed: Compose, name: str) -> None:
    kind = {"of_test_nested": Nested, "of_test_schema_and_group": NestedBase}.get(name, App)
    made: Any = OmegaConf.to_object(composed(name, WITHOUT_APPENDING, "profiler.profile_token_end=5"))
    assert type(made) is kind
    assert made.n in (12, 13)
    if hasattr(made, "db"):
        assert made.db == Database(port=made.db.port)
        assert made.db.port in (3306, 3307)


def test_the_option_becomes_an_object_too(composed: Compose) -> None:
    overrides = ("+profiler=torch_window", "profiler.profile_token_end=5")
    made: Any = OmegaConf.to_object(composed("of_test_prepared", *overrides))
    assert type(made) is Prepared
    assert type(made.profiler) is TorchWindow
    assert made.profiler.profile_token_end == 5
    assert made.profiler.iterations.vllm.max_iterations == 5


def test_instantiate(composed: Compose) -> None:
    config = composed("of_test_app", WITHOUT_APPENDING, "profiler.profile_token_end=5")
    assert instantiate(config.counter) == {"red": 2}
    assert instantiate(config).counter == {"red": 2}


def test_no_config_at_all() -> None:
    GlobalHydra.instance().clear()
    with initialize(version_base=None, config_path=None):
        config = compose(None, ["+profiler=torch_window", "profiler.profile_token_end=5"])
    assert validate(config) is not None
    GlobalHydra.instance().clear()


APP = """\
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from verl_profiler_conf import decode_loop


@dataclass
class App:
    n: int = 12
    {field}


ConfigStore.instance().store(name="app", node=App)


@hydra.main(version_base=None, config_path=None, config_name="app")
def main(cfg):
    app = OmegaConf.to_object(cfg)
    with decode_loop(rows=2) as loop:
        for _ in range(app.n):
            with loop.iteration():
                pass
    print("RAN", type(app).__name__, app.n)


main()
"""


def launch(folder: Path, *arguments: str, field: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "app.py").write_text(APP.replace("{field}", field))
    command = [sys.executable, "app.py", *arguments, "hydra.run.dir=run"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, check=False)


def test_a_launch_captures(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = launch(tmp_path, WITHOUT_APPENDING, "profiler.profile_token_start=2", "profiler.profile_token_end=5")
    assert done.returncode == 0, done.stderr
    assert "RAN App 12" in done.stdout
    assert "tokens [2, 5): 3 iterations of loop, rank 0 -> " in done.stdout
    assert len(list((tmp_path / "run" / "profile").glob("*.pt.trace.json.gz"))) == 1


def test_a_launch_that_appends_is_stopped(tmp_path: Path) -> None:
    done = launch(tmp_path, "+profiler=torch_window", "profiler.profile_token_end=5")
    assert done.returncode == 1
    assert "RAN" not in done.stdout
    assert "Key 'profiler' not in 'App'" in done.stderr


@pytest.mark.parametrize("mode", [(), ("-m",)])
def test_an_option_that_the_apps_field_takes_the_place_of_is_said(mode: tuple[str, ...], tmp_path: Path) -> None:
    """Without appending, the option comes before the app's own config, whose null counts then."""
    done = launch(tmp_path, *mode, WITHOUT_APPENDING, field="profiler: Any = None")
    assert done.returncode == 1
    assert "RAN" not in done.stdout
    assert done.stderr.splitlines()[-1] == (
        "profiler=None: an option is selected, and the app's own config has set its node to this value; the app has a"
        " place for the option: write +profiler=torch_window"
    )
