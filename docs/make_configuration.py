"""Writes docs/configuration.md from the schemas: `python docs/make_configuration.py`; `--check` compares only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from verl_profiler_conf.launch.options import SCHEMAS
from verl_profiler_conf.schema.field_docs import FieldDoc, describe, summary
from verl_profiler_conf.schema.nodes import COMPUTED

PAGE = Path(__file__).with_name("configuration.md")

HEAD = """\
# Configuration

<!-- Made by docs/make_configuration.py from the comments in verl_profiler_conf/schema/options.py: change those. -->

The config group is `profiler`. Select an option with `+profiler=torch_window` (or `profiler=torch_window` in an app
whose defaults list has the group), set its fields with `profiler.FIELD=VALUE`. `verl-profiler plan` and
`--cfg job --resolve` show what a window comes to.

A wrong setting stops the job before it starts. A mistyped field and a wrong type are reported by Hydra and OmegaConf,
in a few lines, as in every typed config (`Key 'profile_token_strat' not in 'TorchWindow'`, `Value 'True' of type 'bool'
could not be converted to Integer`). An integer in text is one: `'12'`, `${oc.env:N}`. What else is wrong (a range, an
order, fields that exclude each other) is reported in one line that names the full key, the value and what is allowed.
Nothing is clamped.

What depends on the machine of the *engine* is known only there: with `device=cuda` and no GPU, or `contents=[cuda]` on
a CPU, the job starts, with a warning where its own process can tell, and the engine says at the window that there is no
capture, and why.

## Options

| option | what it is |
| --- | --- |
"""

FIELDS = """
## Fields

| field | type | default | options | meaning |
| --- | --- | --- | --- | --- |
"""

TAIL = """
Fields below `iterations` are computed from the window and cannot be set.

## In the environment

Engine processes read the settings from the environment variable `VERL_PROFILER_CONF`: one JSON object whose keys are
the fields above, each optional, but for `option`, `iterations`, `steps` and `roles`; and `profiler` (the option's
name), `label` and `run_id`. A job sets it by itself; written by hand it windows any vLLM or SGLang that has the package
installed, without Hydra ([environment variables](environment.md), [servers](servers.md)):

    VERL_PROFILER_CONF='{"profile_token_start": 20, "profile_token_end": 80, "save_path": "/tmp/profile"}'
"""


def render() -> str:
    """The page."""
    options = list(SCHEMAS)
    described = {option: {doc.key: doc for doc in describe(SCHEMAS[option])} for option in options}
    keys = list(dict.fromkeys(key for docs in described.values() for key in docs))
    keys.sort(key=lambda key: key.partition(".")[0] == COMPUTED)  # what a user sets comes first
    lines = [HEAD]
    lines += [f"| `{option}` | {_cell(summary(SCHEMAS[option]))} |\n" for option in options]
    lines.append(FIELDS)
    for key in keys:
        having = [option for option in options if key in described[option] and option != "none"]
        doc = described[having[0]][key]
        default = _defaults(doc, [(option, described[option][key]) for option in options if key in described[option]])
        kind = doc.type.replace("Any", "str")  # a text that must not come from a number
        options_cell = _having(having, options)
        lines.append(f"| `{key}` | {kind} | {default} | {options_cell} | {_cell(doc.help)} |\n")
    lines.append(TAIL)
    return "".join(lines)


def _having(having: list[str], options: list[str]) -> str:
    everyone = [option for option in options if option != "none"]
    return "all" if having == everyone else ", ".join(f"`{option}`" for option in having)


def _defaults(doc: FieldDoc, of_options: list[tuple[str, FieldDoc]]) -> str:
    """The default of the first option that has the field, and of those where it is another."""
    usual = _default(doc)
    others: dict[str, list[str]] = {}
    for option, its in of_options:
        if _default(its) != usual:
            others.setdefault(_default(its), []).append(f"`{option}`")
    return "; ".join([usual, *(f"{', '.join(names)}: {value}" for value, names in others.items())])


def _default(doc: FieldDoc) -> str:
    value: Any = doc.default
    if doc.key == "option":
        return "its name"
    if isinstance(value, str) and value.startswith("${"):
        return "computed"
    if value is None:
        return "`null`" if doc.type else ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    page = render()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") != page:
            print(f"{PAGE.name} is out of date: run `python docs/make_configuration.py`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
