"""Records what docs/pictures/draw.py draws: real rollouts on vLLM, iteration by iteration.

    .venvs/vllm/bin/python docs/pictures/record.py

Run it again when the pictures are to show something else; what is in docs/pictures/recorded/ is kept in the repository.
Each file holds an independent log of all iterations of one rollout (tests/support/vllm_spy.py makes it, without this
package), the manifests that this package wrote, and the iterations that vLLM's own profiler recorded for the same
window with delay = start and max = end - start.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "support"))


def main() -> None:
    from fidelity_vllm import Plain
    from vllm_driver import Driver
    from workloads import Build, Workload, window

    chunked = Build(token_budget=64)
    workloads = [
        Workload("chunks", window(8, 14), prompts=(300,), responses=(24,), build=chunked),
        Workload(
            "several", window(4, 8), prompts=(40, 70, 30, 50), responses=(12,) * 4, build=chunked, arrivals=(0, 0, 5, 9)
        ),
        Workload(
            "speculation",
            window(8, 14),
            prompts=(16,),
            responses=(30,),
            build=Build(overlap=False, speculation="ngram"),
            repetitive=True,
        ),
    ]
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        driver, plain = Driver(models), Plain(models)
        for workload in workloads:
            tracks = {"lead": {}, "any": {"track": "any", "max_captures": None}}
            runs = {
                track: driver.run(
                    replace(workload, settings=workload.settings | more), Path(folder) / f"{workload.name}-{track}"
                )
                for track, more in tracks.items()
            }
            driver.close()
            counted = plain.run(workload, Path(folder) / f"{workload.name}-plain")
            plain.close()
            log, _ = renamed(runs["lead"].log)
            if not log == renamed(runs["any"].log)[0] == renamed(counted.log)[0]:
                raise SystemExit(f"{workload.name}: the three runs are not the same rollout")
            record = {
                "window": [workload.settings["profile_token_start"], workload.settings["profile_token_end"]],
                "prompts": workload.prompts,
                "iterations": log,
                "manifests": {track: manifests(run, renamed(run.log)[1]) for track, run in runs.items()},
                "counters": sorted(traced(counted)),
            }
            (HERE / "recorded" / f"{workload.name}.json").write_text(lines(record))
            print(workload.name, "written", flush=True)


def renamed(log: Any) -> tuple[list[dict[str, list[int]]], dict[str, str]]:
    """The tokens that each request made in each iteration, and the short names: A, B, ... in order of appearance."""
    names: dict[str, str] = {}
    for it in log:
        for request in it.made:
            names.setdefault(request, chr(ord("A") + len(names)))
    return [{names[request]: [made.start, made.stop] for request, made in it.made.items()} for it in log], names


def manifests(run: Any, names: dict[str, str]) -> list[dict[str, Any]]:
    """As they were written, but for the names of requests, and without what tells of this machine."""
    found = []
    for path in sorted(run.folder.rglob("*.manifest.json")):
        text = path.read_text()
        for name, short in names.items():
            text = text.replace(json.dumps(name), json.dumps(short))
        raw = json.loads(text)
        found.append({key: value for key, value in raw.items() if key not in ("host", "pid", "node")})
    return sorted(found, key=lambda raw: raw["rows"][0]["index"] if raw["rows"] else -1)


def traced(run: Any) -> set[int]:
    """The iterations that are in the traces of a run."""
    from oracle import read_trace

    return {number for path in run.folder.rglob("*.trace.json*") for number in read_trace(path).markers["begin"]}


def lines(record: dict[str, Any]) -> str:
    """JSON with one iteration a line."""
    rows = record.pop("iterations")
    text = json.dumps(record, indent=1)[:-2]
    return text + ',\n "iterations": [\n' + ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]\n}\n"


if __name__ == "__main__":
    main()
