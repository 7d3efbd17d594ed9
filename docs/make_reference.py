"""Writes docs/manifest.md and docs/command-line.md from the code: `python docs/make_reference.py`.

`--check` compares only.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from verl_profiler_conf.capture.manifest import IterationRecord, Manifest
from verl_profiler_conf.core.gate.verdict import CloseReason
from verl_profiler_conf.tools import cli

HERE = Path(__file__).parent

CLOSED_BY = {
    "window": "the window's last token was made: all that was asked for is there",
    "request_end": "the followed request ended before the window did, for example at an end-of-sequence token",
    "stop_profile": "start and stop were called, and the stop came inside the window",
    "max_iterations": "`profiler.max_iterations` were captured",
    "part": "the part has `part_iterations` iterations; the rest of the window is the next part",
    "gap": "the lead made no token for more than 8 iterations; the rest of the window is the next part",
    "other_profiler": "other code in the process started a profiler; the rest is the next part, once it has ended",
    "thread": "the loop changed its thread, and a recording ends on the thread it began on; the rest is the next part",
    "job_end": "the job ended, also by an exception, a signal or Ctrl-C",
    "error": "profiling or writing failed; `notes` says why, and the job went on",
}

MANIFEST = """\
# The manifest

<!-- Made by docs/make_reference.py from the classes in verl_profiler_conf/capture/manifest.py: change those. -->

A JSON file beside each trace, `<stem>.manifest.json`. It names its trace (`trace`) when the trace is whole.

From an engine's first iteration on each window has a manifest: as long as there is no capture it is a *placeholder*,
with `trace: null`, no rows, and in `notes` what is known (waited for, never reached, why not captured). The capture
takes its name. So a process that is killed leaves a record of what it was doing.

`verl_profiler_conf.capture.manifest.Manifest.from_json` reads it, also one of a newer release: unknown fields are
ignored. `schema` rises when a field changes its meaning.

"""

COMMANDS = """\
# The command line

<!-- Made by docs/make_reference.py from the parsers in verl_profiler_conf/tools/: change those. -->

`verl-profiler` is installed with the package; `python -m verl_profiler_conf.tools.cli` is the same. It needs neither
torch nor an engine, and imports what a command needs when it runs.

## Exit status

| status | meaning |
| --- | --- |
| 0 | all is well |
| 1 | the command has found something wrong |
| 2 | the command could not be carried out, or was not understood |

What that is for each command stands below.

The result is printed to standard output, what is wrong to standard error. Piped into `head` or `less`, a command ends
quietly when that leaves.

A Hydra app with a wrong profiler setting ends before it starts, with exit status 1 and a line on standard error. A
failure of the profiler later does not change the app's exit status, unless `on_error: raise` is set.
"""


EXIT_STATUS = {
    "report": "1: something is missing or broken, or a trace and its manifest disagree. 2: there is nothing to report"
    " on, or an output cannot be made.",
    "slice": "1: the trace cannot be read, holds nothing of what was asked for, or the output is there already.",
    "merge": "1: a trace cannot be read, the traces do not belong together, or the output is there already.",
    "open": "1: the trace cannot be read, or Ctrl-C came before the browser had read it.",
    "plan": "0 whatever the verdict on counters. 1: something is wrong with the launch. 2: a setting that is refused,"
    " or a command that cannot be started.",
    "doctor": "1: at least one error; warnings are no errors. 2: a command that cannot be started.",
    "generate": "1: `--check` found a difference, or a file was written under `--exit-non-zero-on-write`. 2: the spec"
    " cannot be followed.",
}


def manifest_page() -> str:
    lines = [MANIFEST, "## Fields\n\n| field | type | meaning |\n| --- | --- | --- |\n"]
    lines += _rows(Manifest)
    lines.append("| `rows` | list | one entry for each captured iteration, gaps included: below |\n")
    lines.append("\n## Fields of a row\n\n| field | type | meaning |\n| --- | --- | --- |\n")
    lines += _rows(IterationRecord)
    if set(CLOSED_BY) != set(get_args(CloseReason)):
        raise SystemExit(f"CLOSED_BY in {Path(__file__).name} and CloseReason differ: bring them together")
    lines.append("\n## `closed_by`\n\n| value | the capture, or its part, ended because |\n| --- | --- |\n")
    lines += [f"| `{reason}` | {text} |\n" for reason, text in CLOSED_BY.items()]
    lines.append("| null | nothing was opened: there is no capture |\n")
    return "".join(lines)


def _rows(kind: Any) -> list[str]:
    about = _attributes(kind)
    hints = get_type_hints(kind)
    named = [field.name for field in fields(kind) if field.name != "rows"]
    return [f"| `{name}` | {_type(hints[name], name)} | {about[name]} |\n" for name in named]


def _attributes(kind: Any) -> dict[str, str]:
    """Name -> text of a docstring's `Attributes` section."""
    text = (kind.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", text, re.MULTILINE)
    texts = {name: " ".join(words.split()).replace("|", "\\|").rstrip(".") for name, words in found}
    texts = {name: re.sub(r"\bNone\b", "null", text) for name, text in texts.items()}
    return texts | ({"closed_by": "why it ended: [below](#closed_by)"} if "closed_by" in texts else {})


def _type(hint: Any, name: str) -> str:
    if name == "window":
        return "[int, int or null]"
    if name == "coverage":
        return "[int, int] or null"
    text = str(hint) if get_args(hint) else hint.__name__
    return text.replace(" | None", " or null").replace("None", "null")


def command_page() -> str:
    lines = [COMMANDS]
    parser = cli.make_parser()
    lines.append("\n## `verl-profiler`\n\n" + _options(parser))
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    for name, command in commands.choices.items():
        about = helps[name]
        lines.append(f"\n## `verl-profiler {name}`\n\n{about[0].upper()}{about[1:]}.\n\n{_options(command)}")
        if name in EXIT_STATUS:
            lines.append(f"\nExit status {EXIT_STATUS[name]}\n")
    return "".join(lines)


def _options(parser: argparse.ArgumentParser) -> str:
    lines = ["| argument | meaning |\n| --- | --- |\n"]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
        takes = action.option_strings and action.nargs != 0
        if action.choices:
            takes = False
            names += " " + " or ".join(f"`{choice}`" for choice in action.choices)
        if takes:
            value = action.metavar or action.dest.upper()
            names += " " + " ".join(f"`{part}`" for part in ([value] if isinstance(value, str) else value))
        about = (action.help or "").replace("|", "\\|").replace("%%", "%")
        lines.append(f"| {names} | {about} |\n")
    return "".join(lines)


PAGES = {HERE / "manifest.md": manifest_page, HERE / "command-line.md": command_page}


def main() -> int:
    stale = []
    for path, make in PAGES.items():
        page = make()
        if path.exists() and path.read_text(encoding="utf-8") == page:
            continue
        stale.append(path)
        if "--check" not in sys.argv[1:]:
            path.write_text(page, encoding="utf-8")
    if stale and "--check" in sys.argv[1:]:
        names = ", ".join(path.name for path in stale)
        print(f"{names}: out of date: run `python docs/make_reference.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
