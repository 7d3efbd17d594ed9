"""The pre-commit hooks, in real commits to a scratch repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CLONE = Path(__file__).resolve().parents[2]
PACKAGES = ("hydra_plugins", "verl_profiler_conf")
METADATA = (".pre-commit-hooks.yaml", "LICENSE", "README.md", "pyproject.toml", "setup.cfg")

CHECK = "verl-profiler-generate-check"
FIX = "verl-profiler-generate"

FILES = {
    "conf/config.yaml": "defaults:\n- optional extra: more\n- _self_\nname: app\n",
    "conf/extra/more.yaml": "size: 3\n",
    "conf/references.yaml": "configs: .\nconfig_name: config\nheader: ''\nfiles: [{output: flat.yaml}]\n",
    "conf/flat.yaml": "extra:\n  size: 3\nname: app\n",
    "notes.txt": "",
}

NO_REGISTRY = "(from versions: none)"
"""What pip says of a requirement, whatever it was that kept it from the registry."""

pytestmark = pytest.mark.skipif(os.name == "nt", reason="git's hooks are found another way")


class Repository:
    """A project with configs, a reference made from them, and one of the hooks."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        folder.mkdir()
        self.git("init", "--quiet")

    def git(self, *arguments: str) -> str:
        done = self.try_git(*arguments)
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    def try_git(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("git", *arguments)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
        )

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)
        self.git("add", "--all")

    def commit(self) -> str | None:
        """What the hook says where it stops the commit of what is staged; None where the commit is made."""
        before = self.git("rev-parse", "HEAD")
        done = self.try_git("commit", "--quiet", "--message", "change")
        assert (self.git("rev-parse", "HEAD") == before) is (done.returncode != 0), done.stdout
        return done.stdout if done.returncode else None

    def reference(self) -> str | None:
        """As it is in the last commit."""
        done = self.try_git("show", "HEAD:conf/flat.yaml")
        return done.stdout if done.returncode == 0 else None


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of git and of the hooks: nothing of this machine's settings, and the package as one that is installed."""
    root = tmp_path_factory.mktemp("hooks")
    for name in PACKAGES:
        shutil.copytree(CLONE / name, root / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTHON", "PRE_COMMIT"))}
    return {
        **kept,
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b.example",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b.example",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PRE_COMMIT_HOME": str(root / "pre-commit"),
        "PYTHONPATH": str(root / "site"),
    }


@pytest.fixture(scope="module")
def hooks(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Repository:
    """This project as a repository of hooks."""
    made = Repository(tmp_path_factory.mktemp("project") / "verl-profiler-conf", environment)
    for name in PACKAGES:
        shutil.copytree(CLONE / name, made.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in METADATA:
        shutil.copy2(CLONE / name, made.folder / name)
    made.git("add", "--all")
    made.git("commit", "--quiet", "--message", "a release")
    return made


def project(
    folder: Path, hooks: Repository, hook: str, args: tuple[str, ...] = ("conf/references.yaml",), **changed: str
) -> Repository:
    """A project with the hook installed, and everything committed and up to date."""
    made = Repository(folder, hooks.environment)
    made.write({**FILES, **configured(hooks, hook, args, **changed)})
    made.git("commit", "--quiet", "--message", "first")
    assert made.run(sys.executable, "-m", "pre_commit", "install").returncode == 0
    return made


def configured(hooks: Repository, hook: str, args: tuple[str, ...], **changed: str) -> dict[str, str]:
    entry = {"id": hook, "args": list(args), **changed}
    config = {"repos": [{"repo": str(hooks.folder), "rev": hooks.git("rev-parse", "HEAD"), "hooks": [entry]}]}
    return {".pre-commit-config.yaml": yaml.safe_dump(config)}


@pytest.fixture(params=[CHECK, FIX])
def either(request: pytest.FixtureRequest, tmp_path: Path, hooks: Repository) -> Repository:
    """With one hook or the other, in the environment of these tests: to make one, pre-commit needs a registry."""
    return project(tmp_path / "app", hooks, request.param, language="system")


@pytest.fixture
def checked(tmp_path: Path, hooks: Repository) -> Repository:
    return project(tmp_path / "app", hooks, CHECK, language="system")


@pytest.fixture
def fixed(tmp_path: Path, hooks: Repository) -> Repository:
    return project(tmp_path / "app", hooks, FIX, language="system")


def test_a_commit_with_references_up_to_date_is_made(either: Repository) -> None:
    either.write({"notes.txt": "a note\n"})
    assert either.commit() is None
    either.write({"conf/config.yaml": "# a comment\n" + FILES["conf/config.yaml"]})
    assert either.commit() is None
    assert either.reference() == FILES["conf/flat.yaml"]


def test_check_stops_a_commit_that_only_deletes_a_config(checked: Repository) -> None:
    checked.git("rm", "--quiet", "conf/extra/more.yaml")
    said = checked.commit()
    assert said is not None
    assert "-extra:\n-  size: 3\n name: app\n" in said
    assert checked.git("status", "--short") == "D  conf/extra/more.yaml"


def test_fixer_writes_after_a_commit_that_only_deletes_a_config(fixed: Repository) -> None:
    fixed.git("rm", "--quiet", "conf/extra/more.yaml")
    said = fixed.commit()
    assert said is not None
    assert "written: " in said
    fixed.git("add", "conf/flat.yaml")
    assert fixed.commit() is None
    assert fixed.reference() == "name: app\n"


def test_check_stops_a_commit_that_only_deletes_a_reference(checked: Repository) -> None:
    checked.git("rm", "--quiet", "conf/flat.yaml")
    said = checked.commit()
    assert said is not None
    assert "+++ conf/flat.yaml" in said


def test_fixer_stops_a_commit_without_a_reference_that_git_does_not_know(fixed: Repository) -> None:
    fixed.git("rm", "--quiet", "conf/flat.yaml")  # pre-commit sees changes of tracked files only
    said = fixed.commit()
    assert said is not None
    assert "written: " in said
    fixed.write({"notes.txt": "a note\n"})  # with everything added
    assert fixed.commit() is None
    assert fixed.reference() == FILES["conf/flat.yaml"]


def test_a_reference_out_of_date_stops_a_commit_without_yaml(either: Repository) -> None:
    either.write({"conf/extra/more.yaml": "size: 4\n"})
    either.git("commit", "--quiet", "--no-verify", "--message", "past the hook")
    either.write({"notes.txt": "a note\n"})
    assert either.commit() is not None


@pytest.mark.parametrize("hook", [CHECK, FIX])
@pytest.mark.parametrize(
    ("args", "told"), [((), "name a spec file"), (("gone.yaml",), "gone.yaml: cannot be read: No such file")]
)
def test_without_a_spec_no_commit_is_made(
    hook: str, args: tuple[str, ...], told: str, tmp_path: Path, hooks: Repository
) -> None:
    repository = project(tmp_path / "app", hooks, hook, args, language="system")
    repository.write({"notes.txt": "a note\n"})
    said = repository.commit()
    assert said is not None
    assert f"verl-profiler generate: {told}" in said


@pytest.mark.packaging
@pytest.mark.slow
@pytest.mark.parametrize("hook", [CHECK, FIX])
def test_in_the_environment_that_pre_commit_makes(hook: str, tmp_path: Path, hooks: Repository) -> None:
    repository = project(tmp_path / "app", hooks, hook)
    repository.environment = {name: value for name, value in hooks.environment.items() if name != "PYTHONPATH"}
    installed = repository.run(sys.executable, "-m", "pre_commit", "install-hooks")
    if NO_REGISTRY in installed.stdout and not os.environ.get("CI"):
        pytest.skip("the package registry cannot be reached")
    assert installed.returncode == 0, installed.stdout
    repository.write({"notes.txt": "a note\n"})
    assert repository.commit() is None
    repository.git("rm", "--quiet", "conf/extra/more.yaml")
    assert repository.commit() is not None
    repository.write({"conf/flat.yaml": "name: app\n"})
    assert repository.commit() is None
    repository.write(configured(hooks, hook, ()))
    said = repository.commit()
    assert said is not None
    assert "verl-profiler generate: name a spec file" in said
