"""The documentation points at things that exist: files, headings, make targets, commands."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parent.parent
PAGES = sorted([*CLONE.glob("*.md"), *CLONE.glob("docs/**/*.md")])

FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\[[^\]\n]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`|^ {4}([^\n]+)$|^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
MAKE = re.compile(r"^\s*make ([a-z][a-z-]*)", re.MULTILINE)
COMMAND = re.compile(r"\bverl-profiler ([a-z]+)\b")


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


def test_make_targets_exist() -> None:
    made = set(re.findall(r"^([a-z][a-z-]*):", (CLONE / "Makefile").read_text(), re.MULTILINE))
    code = [part for page in PAGES for parts in CODE.findall(page.read_text()) for part in parts]
    named = {target for part in code for target in MAKE.findall(part)}
    assert named, "no page names a make target: is the pattern still right?"
    assert not named - made


def test_commands_exist() -> None:
    named = {command for page in PAGES for command in COMMAND.findall(page.read_text())}
    shown = subprocess.run(
        [sys.executable, "-m", "verl_profiler_conf.cli", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert not {command for command in named if not re.search(rf"^\s+{command}\b", shown, re.MULTILINE)}


def test_the_configuration_reference_is_that_of_the_schemas() -> None:
    script = CLONE / "docs" / "make_configuration.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_imports_work() -> None:
    line = re.compile(r"^ *from (verl_profiler_conf[\w.]*) import ([\w, ]+)$", re.MULTILINE)
    found = [match for page in PAGES for match in line.findall(page.read_text())]
    shown = {(module, name.strip()) for module, names in found for name in names.split(",")}
    assert shown, "no page imports the package: is the pattern still right?"
    missing = {(module, name) for module, name in shown if not hasattr(importlib.import_module(module), name)}
    assert not missing
