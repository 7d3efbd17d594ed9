"""What `generate` writes is, byte for byte, what `python app.py --cfg job` prints; and it needs no private part of
Hydra, OmegaConf or PyYAML for it."""

from __future__ import annotations

import ast
import enum
import io
import operator
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import verl_profiler_conf.tools.generate
from verl_profiler_conf.tools import cli
from verl_profiler_conf.tools.generate import compose, read_spec, write
from verl_profiler_conf.tools.generate.file_memory import FileMemory

SPEC = """\
configs: .
config_name: config
header: ''
files:
- {output: out.yaml}
- {output: again.yaml, overrides: [last=2]}
"""

CONFIG = "defaults:\n- part: given\n- _self_\nlast: 1\n"

APP = """\
import hydra

@hydra.main(config_path=".", config_name="config", version_base=None)
def main(config):
    pass

main()
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return app_with("k: 1\n", tmp_path)


def app_with(part: str, folder: Path) -> Path:
    """A folder with a config that takes `part` in, and a spec that composes it twice."""
    (folder / "part").mkdir(parents=True, exist_ok=True)
    files = {"config.yaml": CONFIG, "spec.yaml": SPEC, "part/other.yaml": "k: 2\n", "part/given.yaml": part}
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    return folder


def printed_by_hydra(folder: Path, *overrides: str) -> bytes:
    """Standard output of an app with `--cfg job`."""

    @hydra.main(config_path=str(folder), config_name="config", version_base=None)
    def main(config: Any) -> None:
        raise AssertionError("only to be shown")

    GlobalHydra.instance().clear()
    with redirect_stdout(io.StringIO()) as out, mock.patch.object(sys, "argv", ["app.py", "--cfg", "job", *overrides]):
        main()
    return out.getvalue().encode()


def assert_generated_as_printed(folder: Path) -> None:
    write(read_spec(folder / "spec.yaml"))
    assert (folder / "out.yaml").read_bytes() == printed_by_hydra(folder)
    assert (folder / "again.yaml").read_bytes() == printed_by_hydra(folder, "last=2")


TEXTS = st.one_of(
    st.text(max_size=12),
    st.lists(st.text("abc.:$#'{}\"-, é\n\\", min_size=1, max_size=40), max_size=9).map(" ".join),
    st.lists(st.sampled_from([*"ab:#-?!&*|>'\"%@`,[]{}=~ \t\n\r\x85\u2028\ufeff\x07é😀", "a " * 50])).map("".join),
    st.sampled_from(["yes", "1_000", "1e3", "0x1", "null", "~", "???", "", "<<", "=", ".inf", "2001-01-01", "1:30"]),
    st.builds(operator.mul, st.sampled_from(["k", "é", "k ", "k:", "'", "1"]), st.integers(50, 140)),
).map(lambda text: re.sub(r"\$\{+", "$", text))
INTERPOLATIONS = st.sampled_from(["${last}", "${.k}", "${oc.env:HOME}", "a ${last} b", "\\${last}"])
KEYS = st.one_of(TEXTS, st.integers(), st.floats(allow_nan=False), st.booleans())
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=80) | INTERPOLATIONS | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=4
)
CONFIGS = st.lists(VALUES, min_size=100, max_size=100)  # a composition costs more than many configs in it
UNSHRUNK = (
    Phase.explicit,
    Phase.reuse,
    Phase.generate,
)  # the line that differs says enough, and shrinking takes minutes


def compare(folder: Path, values: list[Any]) -> None:
    content = {f"config{index}": value for index, value in enumerate(values)}
    app_with(yaml.safe_dump(content, allow_unicode=True, width=1000), folder)
    write(read_spec(folder / "spec.yaml"))
    printed = printed_by_hydra(folder)
    for name, shown in (("out.yaml", printed), ("again.yaml", printed.replace(b"\nlast: 1\n", b"\nlast: 2\n"))):
        assert (folder / name).read_bytes().decode().split("\n") == shown.decode().split("\n")


@settings(max_examples=20, deadline=None, phases=UNSHRUNK)  # of 100 configs each
@given(values=CONFIGS)
@example(values=[{"k" * length: 0.5} for length in range(110, 140)])
def test_random_configs(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    compare(tmp_path_factory.getbasetemp() / "random", values)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, phases=UNSHRUNK)
@given(values=CONFIGS)
def test_more_random_configs(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    compare(tmp_path_factory.getbasetemp() / "random", values)


def test_processes_of_their_own(tmp_path: Path) -> None:
    keys = [unit * (length // len(unit)) for length in range(110, 140) for unit in ("k", "k ", "k:")]
    content = {"keys": [{key.strip(): 0.5} for key in keys], "texts": ["a b " * 60, "y", "1e3"]}
    folder = app_with(yaml.safe_dump(content, allow_unicode=True), tmp_path)
    (folder / "app.py").write_text(APP)
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    shown = subprocess.run(
        [sys.executable, "app.py", "--cfg", "job"], cwd=folder, env=environment, capture_output=True, check=True
    )
    assert cli.main(["generate", str(folder / "spec.yaml")]) == 0
    assert (folder / "out.yaml").read_bytes() == shown.stdout


PIECES = st.sampled_from(
    [
        *"ab12.-:#{}[],&*!|>'\"%@`?~ =_e$\\\t\r\n\ufeff\x85é😀",
        "\n  ",
        ": ",
        "- ",
        " #",
        "???",
        "&a ",
        "*a",
        "!!binary ",
        "!!set ",
        "!!python/object/apply:pathlib.Path [x]",
        "1e3",
        "yes",
    ]
)
SHAPES = ("k: {}\n", "- {}\n", "{{a: {}}}\n", "[{}]\n", "{}: 1\n", "a:\n  b: {}\nc: ???\n", "# {}\nk: 1\n", "{}\n")


class TestFileMemory:
    @settings(max_examples=600, deadline=None)
    @given(st.sampled_from(SHAPES), st.lists(PIECES, min_size=1, max_size=9).map("".join))
    @example("{}: 1\n", "a: 1\na")
    @example("k: {}\n", "!!python/object/apply:pathlib.Path [x]")
    @example("k: {}\n", "&a !!python/object/apply:pathlib.Path [x]\nl: *a")
    def test_reads_what_omegaconf_reads_every_time(
        self, tmp_path_factory: pytest.TempPathFactory, shape: str, text: str
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "read.yaml"
        path.write_bytes(shape.format(text).encode())
        expected = outcome(path)
        with FileMemory().in_use():
            assert [outcome(path), outcome(path), outcome(path)] == [expected] * 3

    def test_every_file_of_verl(self, verl_package: Callable[[str], Path]) -> None:
        files = sorted(verl_package("0.9.1").rglob("*.yaml"))
        assert len(files) > 50
        expected = [outcome(path) for path in files]
        with FileMemory().in_use():
            assert [outcome(path) for path in files * 2] == expected * 2

    def test_a_file_is_parsed_once_and_each_reader_has_a_copy(self, app: Path) -> None:
        memory = FileMemory()
        with mock.patch.object(yaml, "load", wraps=yaml.load) as parse:
            for _ in range(3):
                with memory.in_use():
                    config = load(app / "part" / "given.yaml")
                    assert config == {"k": 1}
                    config.k = 5
        assert parse.call_count == 1

    def test_a_file_that_changed_is_read_again(self, app: Path) -> None:
        path = app / "part" / "given.yaml"
        with FileMemory().in_use():
            assert load(path) == {"k": 1}
            path.write_text("k: 1000\n")
            assert load(path) == {"k": 1000}

    def test_what_is_not_a_whole_file_of_text_is_read_as_ever(self, app: Path) -> None:
        path = app / "part" / "given.yaml"
        path.write_text("a: 1\nb: 2\n")
        with zipfile.ZipFile(app / "configs.zip", "w") as archive:
            archive.writestr("in.yaml", "z: 1\n")
        with FileMemory().in_use():
            for _ in range(2):
                assert load(path) == {"a": 1, "b": 2}
                assert OmegaConf.load(path) == {"a": 1, "b": 2}
                assert OmegaConf.load(str(path)) == {"a": 1, "b": 2}
                assert OmegaConf.load(io.StringIO("c: 3")) == {"c": 3}
                with path.open("rb") as binary:
                    assert OmegaConf.load(binary) == {"a": 1, "b": 2}
                with path.open(encoding="utf-8") as file:
                    file.seek(5)
                    assert OmegaConf.load(file) == {"b": 2}
                with zipfile.Path(app / "configs.zip", "in.yaml").open() as member:
                    assert OmegaConf.load(member) == {"z": 1}
            with pytest.raises(TypeError, match="Unexpected file type"):
                OmegaConf.load(3)  # type: ignore[arg-type]

    def test_a_value_that_cannot_be_pickled_is_read_again(self, app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Local(enum.Enum):
            A = 1

        constructors = {**yaml.SafeLoader.yaml_constructors, "!local": lambda loader, node: Local.A}
        monkeypatch.setattr(yaml.SafeLoader, "yaml_constructors", constructors)
        (app / "part" / "given.yaml").write_text("k: !local x\n")
        with FileMemory().in_use():
            assert load(app / "part" / "given.yaml").k is Local.A
            assert load(app / "part" / "given.yaml").k is Local.A
        assert_generated_as_printed(app)


class TestWithout:
    """Where a release of theirs lacks what is used to be quick or tidy, the bytes are the same."""

    def test_hydra_reading_through_omegaconf_load(self, app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read, calls = OmegaConf.load, []
        theirs = SimpleNamespace(load=lambda file: calls.append(file) or read(file))
        for source in Plugins.instance().discover(ConfigSource):
            module = sys.modules[source.__module__]
            if source.scheme() in ("file", "pkg"):
                monkeypatch.setattr(module, "OmegaConf", theirs)
        assert_generated_as_printed(app)
        assert calls

    def test_configs_that_can_be_pickled(self, app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> bytes:
            raise TypeError("cannot pickle")

        monkeypatch.setattr(pickle, "dumps", refuse)
        assert_generated_as_printed(app)

    def test_the_version_base_of_the_process(self, app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compose, "version", SimpleNamespace())
        assert_generated_as_printed(app)

    def test_what_composing_needs_is_one_line_of_error(
        self, app: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delattr(hydra, "initialize_config_dir")
        assert cli.main(["generate", str(app / "spec.yaml")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("verl-profiler generate: out.yaml: ")
        assert "initialize_config_dir" in line
        assert not (app / "out.yaml").exists()


def test_no_private_part_of_hydra_omegaconf_or_yaml_is_named() -> None:
    modules = sorted(Path(verl_profiler_conf.tools.generate.__file__).parent.rglob("*.py"))
    assert len(modules) > 3
    named = [f"{path.name}: {name}" for path in modules for name in private_names_of_others(path.read_text())]
    assert named == []


@pytest.mark.parametrize(
    "code",
    [
        "import hydra._internal.utils",
        "from hydra._internal import utils",
        "from omegaconf import _utils",
        "config._set_flag('struct', False)",
        "self.config._metadata",
        "getattr(config, '_content')",
    ],
)
def test_a_private_part_would_be_found(code: str) -> None:
    assert private_names_of_others(code)


def private_names_of_others(code: str) -> list[str]:
    """Names with an underscore, of attributes of anything but `self` and of imports, and in the text of a literal."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found += [node.attr]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found += [part for alias in node.names for part in alias.name.split(".")]
            found += (getattr(node, "module", None) or "").split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [node.value]
    return [name for name in found if name.startswith("_") and name.isidentifier() and not name.startswith("__")]


def load(path: Path) -> Any:
    """As Hydra's config sources do: the header first."""
    with path.open(encoding="utf-8") as file:
        file.read(512)
        file.seek(0)
        return OmegaConf.load(file)


def outcome(path: Path) -> Any:
    try:
        config = load(path)
        return repr(config), OmegaConf.to_yaml(config) if OmegaConf.is_config(config) else None
    except Exception as error:
        return type(error), str(error)
