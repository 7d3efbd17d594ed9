"""Released wheels: fetched once; without a registry a test is skipped, but never on CI."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest
import released
from released import RegistryUnreachableError, released_or_skip

FILES = {"there/conf/a.yaml": "a: 1\n", "there/conf/deep/b.yaml": "b: 2\n", "there/code.py": "pass\n"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(released, "CACHE", tmp_path / "cache")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel, which is all that pip knows of."""
    folder = tmp_path / "registry"
    folder.mkdir()
    with ZipFile(folder / "there-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in {
            **FILES,
            "there-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: there\nVersion: 1.0\n",
            "there-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "there-1.0.dist-info/RECORD": "",
        }.items():
            wheel.writestr(name, text)
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


@pytest.fixture
def no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip asks a port at which nobody listens."""
    values = {"CONFIG_FILE": "/dev/null", "INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "1", "TIMEOUT": "1"}
    for name in ("EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name, value in values.items():
        monkeypatch.setenv(f"PIP_{name}", value)


def files_in(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_only_the_files_asked_for_are_kept_and_fetched_once(registry: Path) -> None:
    folder = released_or_skip("there", "1.0", "*.yaml")
    assert files_in(folder) == {name: text for name, text in FILES.items() if name.endswith(".yaml")}
    assert released_or_skip("there", "1.0", "*.py", "*.yaml") == folder
    assert files_in(folder) == FILES
    (registry / "there-1.0-py3-none-any.whl").unlink()
    assert files_in(released_or_skip("there", "1.0", "*.yaml", "*.py")) == FILES


def test_what_no_release_holds_is_an_error_everywhere(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(LookupError, match=r"there-1\.0: no there/none\.py in its wheel"):
        released_or_skip("there", "1.0", "there/none.py")
    with pytest.raises(RuntimeError, match=r"there 2\.0: pip could not download it: (?s:.*)No matching distribution"):
        released_or_skip("there", "2.0", "*.py")


@pytest.mark.usefixtures("no_registry")
@pytest.mark.parametrize(
    ("ci", "outcome"),
    [
        (None, pytest.skip.Exception),
        ("", pytest.skip.Exception),
        ("1", pytest.fail.Exception),
        ("true", pytest.fail.Exception),
    ],
)
def test_no_answer_from_a_registry(ci: str | None, outcome: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    if ci is None:
        monkeypatch.delenv("CI", raising=False)
    else:
        monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match=r"there 1\.0: the package registry cannot be reached"):
        released_or_skip("there", "1.0", "*.yaml")


@pytest.mark.usefixtures("no_registry")
def test_no_answer_outside_a_test_is_an_error() -> None:
    with pytest.raises(RegistryUnreachableError):
        released.released("there", "1.0", "*.yaml")
