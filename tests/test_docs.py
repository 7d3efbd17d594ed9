"""The documentation points at things that exist: files, headings, make targets, commands."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest
from clone import CLONE

from verl_profiler_conf.launch.options import SCHEMAS

PAGES = sorted([*CLONE.glob("*.md"), *CLONE.glob("docs/**/*.md")])

FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\[[^\]\n]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`|^ {4}([^\n]+)$|^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
MAKE = re.compile(r"^\s*make ([a-z][a-z-]*)", re.MULTILINE)
COMMAND = re.compile(r"\bverl-profiler ([a-z]+)\b")
FIELD = re.compile(r"(?<![\w./])profiler\.([a-z_]+)")
FOLDERS = (".ci", "benchmarks", "docs", "examples", "hydra_plugins", "tests", "verl_profiler_conf")
PATH = re.compile(rf"(?<![\w./$~-])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w.*/+-]*")
ELSEWHERE = {"hydra_plugins/__init__.py"}  # of another package, and a fault there
SHORT_PATH = re.compile(r"^(?:[\w-]+/)+$|^[\w/-]+\.(?:py|txt|yaml)$")
TRANSLATED = sorted(CLONE.glob("docs/zh/*.md"))


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The fragment of each heading, as code hosts make them: lower case, no punctuation, hyphens for blanks."""
    seen: dict[str, int] = {}
    result = set()
    for heading in HEADING.findall(prose(page)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        result.add(f"{slug}-{count}" if count else slug)
    return result


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(CLONE).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere: not this test's to reach
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (fragment and there.suffix == ".md" and fragment not in anchors(there)):
            broken.append(target)
    assert not broken


def files() -> list[str]:
    """Of this repository, by their paths in it."""
    found = (path for folder in FOLDERS for path in (CLONE / folder).rglob("*"))
    return [path.relative_to(CLONE).as_posix() for path in found if path.is_file() and "__pycache__" not in path.parts]


@pytest.mark.parametrize("page", [*PAGES, CLONE / "Makefile"], ids=lambda page: page.relative_to(CLONE).as_posix())
def test_paths_of_this_repository_exist(page: Path) -> None:
    named = {path.rstrip("./") for path in PATH.findall(page.read_text())}
    tree = {part for file in files() for part in (file, *map(str, PurePosixPath(file).parents))}
    assert not {path for path in named - ELSEWHERE if not fnmatch.filter(tree, path)}


def test_short_paths_where_things_go_exist() -> None:
    """CONTRIBUTING names files and folders of the package and of tests/ also without the folder they are in."""
    named = {span for span in spans_of((CLONE / "CONTRIBUTING.md").read_text()) if SHORT_PATH.match(span)}
    assert named, "no short path: is the pattern still right?"
    tree = [f"/{file}" for file in files()]
    assert not {path for path in named if not any(f"/{path}" in file for file in tree)}


def test_make_targets_exist() -> None:
    made = set(re.findall(r"^([a-z][a-z-]*):", (CLONE / "Makefile").read_text(), re.MULTILINE))
    code = [part for page in PAGES for parts in CODE.findall(page.read_text()) for part in parts]
    named = {target for part in code for target in MAKE.findall(part)}
    assert named, "no page names a make target: is the pattern still right?"
    assert not named - made


def test_commands_exist() -> None:
    named = {command for page in PAGES for command in COMMAND.findall(page.read_text())}
    shown = subprocess.run(
        [sys.executable, "-m", "verl_profiler_conf.tools.cli", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert not {command for command in named if not re.search(rf"^\s+{command}\b", shown, re.MULTILINE)}


def test_fields_exist() -> None:
    known = {name for option in SCHEMAS.values() for name in option.__dataclass_fields__}
    code = [part for page in PAGES for parts in CODE.findall(page.read_text()) for part in parts]
    named = {field for part in code for field in FIELD.findall(part)}
    assert {"profile_token_start", "save_path"} <= named, "no page names a field: is the pattern still right?"
    assert not named - known


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.name)
def test_a_translation_says_what_the_original_says(page: Path) -> None:
    """Whatever is not prose is the same in both; and each leads to the other before anything else."""
    original = page.parents[1] / page.name
    texts = original.read_text(), page.read_text()
    assert texts[0].splitlines()[2] == f"[中文](zh/{page.name})"
    assert texts[1].splitlines()[2] == f"[English](../{page.name})"
    blocks, spans = zip(*((re.findall(r"^ {4}.+$", text, re.MULTILINE), spans_of(text)) for text in texts), strict=True)
    assert blocks[0] == blocks[1]
    assert spans[0] == spans[1]
    levels = [re.findall(r"^(#{1,6}) ", FENCE.sub("", text), re.MULTILINE) for text in texts]
    assert levels[0] == levels[1]
    shapes = [re.findall(r"^(\|.*\|)$", text, re.MULTILINE) for text in texts]
    assert [row.replace("\\|", "").count("|") for row in shapes[0]] == [
        row.replace("\\|", "").count("|") for row in shapes[1]
    ]


def spans_of(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def test_the_configuration_reference_is_that_of_the_schemas() -> None:
    check("make_configuration.py")


def test_the_manifest_and_the_command_line_are_those_of_the_code() -> None:
    check("make_reference.py")


def check(script: str) -> None:
    command = [sys.executable, str(CLONE / "docs" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_imports_work() -> None:
    line = re.compile(r"^ *from (verl_profiler_conf[\w.]*) import ([\w, ]+)$", re.MULTILINE)
    found = [match for page in PAGES for match in line.findall(page.read_text())]
    shown = {(module, name.strip()) for module, names in found for name in names.split(",")}
    assert shown, "no page imports the package: is the pattern still right?"
    missing = {(module, name) for module, name in shown if not hasattr(importlib.import_module(module), name)}
    assert not missing


def said() -> list[str]:
    """Every text of the package's code, with a mark for each value in it."""
    found = []
    for path in [*(CLONE / "verl_profiler_conf").rglob("*.py"), *(CLONE / "hydra_plugins").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(?:[\d.,]*[sdrf])", "…", node.value))
    return [" ".join(text.split()) for text in found]


def test_listed_messages_are_those_of_the_code() -> None:
    """The words between the values of each message in a table stand in the code, but for messages of others."""
    page = (CLONE / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = [
        row
        for table in page.split("| message |")[1:]
        for row in re.findall(r"^\| `([^`]+)` \|", table.partition("\n\n")[0], re.MULTILINE)
    ]
    assert len(messages) > 30, "few messages: is the pattern still right?"
    texts = "\n".join(said())
    lost = []
    for message in messages:
        pieces = [piece.strip(" :;,()") for piece in re.split(r"\.\.\.|: ", message)]
        if not all(piece in texts for piece in pieces if len(piece) > 3):
            lost.append(message)
    assert not lost


def test_compatibility_names_the_releases_that_are_known() -> None:
    """The oldest and newest of each engine that the code takes, and those that the tests run or read."""
    from verl_profiler_conf.core.releases import SGLANG, VLLM

    page = (CLONE / "docs" / "compatibility.md").read_text(encoding="utf-8")
    known = {
        release for tried in (VLLM, SGLANG) for release in (tried.tokens_since, tried.newest, *tried.run, *tried.read)
    }
    assert not {release for release in known if not re.search(rf"(?<![\d.]){re.escape(release)}(?![\d])", page)}
