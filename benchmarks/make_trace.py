"""A trace of any size out of a real one: its events again and again, each copy later, with numbers of its own.

    .venv/bin/python benchmarks/make_trace.py ../shared/traces/cuda_nccl_with_config.json.gz /tmp/large.json --mb 1000

Times, correlation ids, external ids, arrows and step numbers go on from copy to copy, as in a run that was recorded
for longer.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NUMBERS = re.compile(
    r'("ts": )(\d+(?:\.\d+)?)|("(?:correlation|External id|Ev Idx|Record function id|id)": )(\d+)|(ProfilerStep#)(\d+)'
)


def make_trace(source: Path, target: Path, megabytes: int) -> None:
    """Write `target`, of `megabytes` (10^6 bytes) or a little more, pretty-printed as `source` is.

    Args:
        source: a real trace, `.json.gz`.
        target: where to, `.json`.
        megabytes: size wanted.
    """
    with gzip.open(source) as file:
        text = file.read().decode()
    begin = text.index("[", text.index('"traceEvents"'))
    events, end = json.JSONDecoder().raw_decode(text, begin)
    body = text[begin + 1 : end - 1].strip()
    with target.open("w") as out:
        written = out.write(text[: begin + 1] + "\n")
        for number, copy in enumerate(_copies(body, events)):
            written += out.write(("" if number == 0 else ",\n") + copy)
            if written >= megabytes * 1_000_000:
                break
        out.write("\n" + text[end - 1 :])


def _copies(body: str, events: list[dict[str, Any]]) -> Iterator[str]:
    timed = [e for e in events if e.get("ph") == "X" and isinstance(e.get("pid"), int)]
    first = min(e["ts"] for e in timed)
    span = max(e["ts"] + e.get("dur", 0) for e in timed) - first + 1000
    ids = 1 + max(
        max(int(e.get("args", {}).get(key, 0) or 0) for key in ("correlation", "External id", "Ev Idx")) for e in timed
    )
    steps = [int(e["name"].split("#")[1]) for e in events if str(e.get("name", "")).startswith("ProfilerStep#")]
    each = max(steps, default=0) - min(steps, default=0) + 1
    number = 0
    while True:
        later, more, step = number * round(span), number * ids, number * each

        def moved(match: re.Match[str], later: int = later, more: int = more, step: int = step) -> str:
            if match[1]:
                whole, dot, part = match[2].partition(".")
                return f"{match[1]}{int(whole) + later}{dot}{part}"
            return f"{match[3]}{int(match[4]) + more}" if match[3] else f"{match[5]}{int(match[6]) + step}"

        yield _NUMBERS.sub(moved, body) if number else body
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--mb", type=int, default=1000)
    arguments = parser.parse_args()
    make_trace(arguments.source, arguments.target, arguments.mb)


if __name__ == "__main__":
    main()
