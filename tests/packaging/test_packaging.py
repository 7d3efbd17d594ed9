"""The package as users get it: from a wheel, from an sdist and in editable form, with Hydra 1.3 and the 1.4 candidate.

Each form is installed into an empty environment of its own that holds the declared dependencies and nothing else, so
these tests also prove that the base dependencies suffice, torch not among them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from clone import CLONE

SHIPPED = ("LICENSE", "README.md", "hydra_plugins", "pyproject.toml", "setup.cfg", "verl_profiler_conf")
HYDRAS = ("hydra-core==1.3.8", "hydra-core==1.4.0rc3")
FORMS = ("wheel", "sdist", "editable")

APP = """\
import sys
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    assert "torch" not in sys.modules
    print("ran with", dict(cfg))

main()
"""

pytestmark = [pytest.mark.packaging, pytest.mark.slow]

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def run(command: list[str], cwd: Path, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    # without the variables that would let the clone, or a window for engines, leak into the environments
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VERL_PROFILER"))}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=300, check=False)
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def copy_of_the_sources(folder: Path) -> Path:
    """The clone without what earlier builds left in it: setuptools would pack stale files from build/."""
    folder.mkdir()
    for name in SHIPPED:
        if (CLONE / name).is_dir():
            shutil.copytree(CLONE / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(CLONE / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Form -> what `pip install` is given for it; and the sources of the two archives."""
    root = tmp_path_factory.mktemp("built")
    sources = copy_of_the_sources(root / "sources")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(root / "dist"), str(sources)], cwd=root)
    (wheel,) = (root / "dist").glob("*.whl")
    (sdist,) = (root / "dist").glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist, "editable": copy_of_the_sources(root / "editable"), "sources": sources}


@pytest.fixture(scope="session")
def wheels_for(tmp_path_factory: pytest.TempPathFactory, built: dict[str, Path]) -> Callable[[str], Path]:
    """Hydra requirement -> folder with wheels of all that the package then needs, fetched once."""
    made: dict[str, Path] = {}

    def fetch(hydra: str) -> Path:
        if hydra not in made:
            made[hydra] = tmp_path_factory.mktemp("wheels")
            needs = [str(built["wheel"]), hydra, "setuptools>=70.1", "wheel"]
            run([*PIP, "wheel", "--quiet", "--wheel-dir", str(made[hydra]), *needs], cwd=made[hydra])
        return made[hydra]

    return fetch


@pytest.fixture(scope="session", params=[(form, hydra) for hydra in HYDRAS for form in FORMS], ids="-".join)
def python(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    built: dict[str, Path],
    wheels_for: Callable[[str], Path],
) -> Path:
    """The interpreter of an environment that holds the package in one form, and one Hydra."""
    form, hydra = request.param
    wheels = wheels_for(hydra)
    environment = tmp_path_factory.mktemp(form) / "venv"
    venv.create(environment, symlinks=True)
    interpreter = environment / "bin" / "python"
    what = ["--editable", str(built[form])] if form == "editable" else [str(built[form])]
    if form == "wheel":
        (wheels / built[form].name).unlink(missing_ok=True)  # else the name alone would do, whatever the file is
    install = ["install", "--quiet", "--no-index", "--find-links", str(wheels), hydra, *what]
    run([*PIP, "--python", str(interpreter), *install], cwd=environment)
    return interpreter


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app.py"
    path.write_text(APP)
    return path


def test_hydra_lists_the_plugin(python: Path, app: Path) -> None:
    shown = run([str(python), app.name, "--info", "plugins"], cwd=app.parent).stdout
    assert shown.count("VerlProfilerConfSearchPath") == 1, shown


def test_hydra_lists_the_provider_of_the_groups(python: Path, app: Path) -> None:
    shown = run([str(python), app.name, "--info", "searchpath"], cwd=app.parent).stdout
    (line,) = [line for line in shown.splitlines() if "pkg://verl_profiler_conf.conf" in line]
    assert "verl_profiler_conf" in line.split("pkg://")[0], shown


def test_option_composes(python: Path, app: Path) -> None:
    override = ["+profiler=torch_window", "profiler.profile_token_start=20", "profiler.profile_token_end=80"]
    shown = run([str(python), app.name, *override, "--cfg", "job", "--resolve"], cwd=app.parent)
    assert "profile_token_start: 20" in shown.stdout, shown.stdout + shown.stderr
    assert "profile_token_end: 80" in shown.stdout
    assert "rror" not in shown.stderr, shown.stderr


def test_app_without_the_option_is_as_before(python: Path, app: Path) -> None:
    done = run([str(python), app.name], cwd=app.parent)
    assert done.stdout == "ran with {}\n"
    # Hydra 1.4 remarks on the app's own version_base, and would name a plugin that made a warning while it was scanned
    assert "verl_profiler" not in done.stderr, done.stderr
    assert "plugins scanner" not in done.stderr, done.stderr


def test_version_and_public_names(python: Path, app: Path) -> None:
    code = (
        "import sys, importlib.metadata as m, verl_profiler_conf as v; "
        "assert v.__version__ == m.version('verl-profiler-conf'); "
        "assert not [n for n in sys.modules if n.startswith('verl_profiler_conf.')]; "  # nothing before its first use
        "print([n for n in v.__all__ if not hasattr(v, n)])"
    )
    assert run([str(python), "-c", code], cwd=app.parent).stdout == "[]\n"


def test_command_line_is_installed(python: Path, app: Path) -> None:
    assert "usage" in run([str(python.with_name("verl-profiler")), "--help"], cwd=app.parent).stdout.lower()


def files_of(archive: Path) -> set[str]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return set(wheel.namelist())
    with tarfile.open(archive) as sdist:
        return {name.partition("/")[2] for name in sdist.getnames()}


@pytest.mark.parametrize("form", ["wheel", "sdist"])
def test_archive_holds_all_files_of_the_package(built: dict[str, Path], form: str) -> None:
    packages = [built["sources"] / name for name in ("verl_profiler_conf", "hydra_plugins")]
    files = [path.relative_to(built["sources"]) for package in packages for path in package.rglob("*")]
    wanted = {path.as_posix() for path in files if path.suffix in {".py", ".yaml", ".typed", ".css", ".js"}}
    assert "verl_profiler_conf/py.typed" in wanted
    assert not wanted - files_of(built[form])


def test_namespace_stays_everybodys(built: dict[str, Path]) -> None:
    names = files_of(built["wheel"])
    assert "hydra_plugins/verl_profiler_conf/__init__.py" in names
    assert "hydra_plugins/__init__.py" not in names  # it would hide the plugins of everybody else
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/", "examples/"))]
