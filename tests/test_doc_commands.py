"""Commands in the documentation do what the page shows, or the page says that they are not run here.

Above each block with a command stands a comment that the reader of the page does not see:

    <!-- run -->                            its `$` lines are run, and have to print what is below them
    <!-- run, exit status 1 -->             the same, of commands that fail
    <!-- not run here: needs a server -->   for what cannot run on any machine with this project's main environment

A line `...` stands for any number of lines, and `...` within a line for any text. Times, sizes, versions, process ids
and the frames of tables do not count.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from clone import CLONE

pytest.importorskip("transformers")

PAGES = [
    CLONE / "README.md",  # first: what its commands leave is looked at on other pages
    *sorted(page for page in [*CLONE.glob("*.md"), *CLONE.glob("docs/**/*.md")] if page.name != "README.md"),
]
TRANSLATIONS = CLONE / "docs" / "zh"
"""Their blocks are those of the originals, which another test holds."""

APP = CLONE / "tests" / "support" / "docs_app"

PROGRAMS = "python|pip|make|torchrun|nsys|ray|vllm|curl|eval|git|verl-profiler|sglang|jq"
COMMAND = re.compile(
    rf"^ *(?:\$ )?(?:[A-Z_]+=(?:'[^']*'|\S+) +\\?)*(?:\.venvs?/\S+/)?(?!verl-profiler \w+:)(?:{PROGRAMS})(?: |$)",
    re.MULTILINE,
)
BLOCK = re.compile(r"(?:^ {4}[^\n]*\n(?:[ \t]*\n(?= {4}))?)+|^```[^\n]*\n.*?^```", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"<!-- (?:run(?:, exit status (\d))?|not run here: (.+)) -->\s*$")


@dataclass(frozen=True)
class Block:
    """One block with commands."""

    page: Path
    line: int
    text: str
    marker: re.Match[str] | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(CLONE)}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.marker is not None and self.marker[2] is None

    @property
    def status(self) -> int:
        return int((self.marker and self.marker[1]) or 0)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        content = "\n".join(line.removeprefix("    ") for line in match[0].strip("\n").splitlines())
        if not COMMAND.search(content) or "| " in content[:2]:
            continue
        before = text[: match.start()]
        marker = MARKER.search(before.rstrip().rpartition("\n")[2]) if before.strip() else None
        found.append(Block(page, before.count("\n") + 1, content, marker))
    return found


def all_blocks() -> list[Block]:
    return [block for page in PAGES if TRANSLATIONS not in page.parents for block in blocks(page)]


def test_every_block_with_a_command_says_whether_it_is_run() -> None:
    found = all_blocks()
    assert found, "no block: is the pattern still right?"
    unsaid = [str(block) for block in found if block.marker is None]
    assert not unsaid, f"write <!-- run --> or <!-- not run here: why --> above: {unsaid}"


def test_a_block_that_is_run_marks_its_commands() -> None:
    runs = [block for block in all_blocks() if block.is_run]
    assert runs, "no block is run: is the pattern still right?"
    assert not [str(block) for block in runs if not block.text.startswith("$ ")]


def steps(text: str) -> list[tuple[str, list[str]]]:
    """Each command with the lines that it is shown to print."""
    found: list[tuple[str, list[str]]] = []
    goes_on = False
    for line in text.splitlines():
        if line.startswith("$ ") or goes_on:
            if goes_on:
                found[-1] = (f"{found[-1][0]}\n{line}", [])
            else:
                found.append((line[2:], []))
            goes_on = line.endswith("\\")
        else:
            found[-1][1].append(line)
    return found


FRAME = re.compile(r"^[\s┏┡└┗├━─┓┩┘┛┤┳╇┴┻┼╈]*$")
NUMBERS = (
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:,\d+)?"), "TIME"),
    (re.compile(r"pid\d+"), "pidN"),
    (re.compile(r"\b\d+(?:\.\d+)+(?:[\w+.]*)"), "V"),  # also versions
    (re.compile(r"\d{1,3}(?:,\d{3})+"), "N"),
    (re.compile(r"\d{3,}"), "N"),
    (re.compile(r"\d+%"), "N%"),
)


def plain(line: str) -> str:
    for pattern, name in NUMBERS:
        line = pattern.sub(name, line)
    return " ".join(line.split())


def seen(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if not FRAME.match(line) and not line.startswith("USDT:")]
    return [plain(line) for line in lines]


def expected(shown: list[str]) -> re.Pattern[str]:
    parts = []
    for line in shown:
        if line.strip() == "...":
            parts.append(r"(?:.*\n)*?")
        elif not FRAME.match(line):
            parts.append(".*".join(re.escape(plain(piece)) for piece in line.split("...")) + r"\n")
    return re.compile("".join(parts).replace(r"\n\n", r"\n"))


def run(command: str, folder: Path) -> tuple[int, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_commands_print_what_is_shown(tmp_path: Path) -> None:
    shutil.copytree(CLONE / "examples", tmp_path / "examples")
    shutil.copytree(APP, tmp_path, dirs_exist_ok=True)
    known: dict[str, tuple[int, str]] = {}
    wrong = []
    for block in all_blocks():
        if not block.is_run:
            continue
        for command, shown in steps(block.text):
            if command not in known:
                known[command] = run(command, tmp_path)
            status, output = known[command]
            if status != block.status:
                wrong.append(f"{block}: exit status {status}: {command}\n{output[-1500:]}")
            elif shown and not expected(shown).fullmatch("".join(f"{line}\n" for line in seen(output))):
                wrong.append(f"{block}: {command}\n" + "\n".join(seen(output))[-3000:])
    assert not wrong, "\n\n".join(wrong)
