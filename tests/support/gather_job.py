"""A Hydra-less job over Ray: a decode loop on each node, windowed; the driver has no engine of its own.

    python gather_job.py FOLDER JSON

JSON: `settings` for the window; `nodes`, the addresses on which a loop runs; `then`: `shutdown` (the app ends Ray
itself before the job ends), `wait` (the job goes on until the captures are in the driver's folder), a path (the job
goes on until that file exists); `asked`: the job knows that it asks each node for a capture; `every`: seconds between
two looks.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_profiler_conf import Job, Settings, decode_loop
from verl_profiler_conf.core.asked import Asked
from verl_profiler_conf.core.place import PLACE_NAME, Place
from verl_profiler_conf.core.settings import ENV_NAME
from verl_profiler_conf.launch import collect, watch

TOKENS = 12


def loop(place: str) -> str:
    """What runs on a node: one response of 12 tokens, with a little work for each."""
    import torch

    os.environ[PLACE_NAME] = place
    with decode_loop(1) as rollout:
        for _ in range(TOKENS):
            with rollout.iteration():
                torch.ones(8).sum()
    from verl_profiler_conf.capture.session import close_all

    close_all()  # else the trace is written when the process ends
    return os.environ[ENV_NAME]


def main(folder: Path, told: dict[str, Any]) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    raw = {"save_path": str(folder), "device": "cpu", "profile_token_start": 4, "profile_token_end": 6}
    settings = Settings.from_mapping({**raw, **told.get("settings", {})})
    for module, name in ((watch, "EVERY_S"), (collect, "GATHER_EVERY_S")):
        setattr(module, name, told.get("every", getattr(module, name)))
    places = [Place(number, number, node) for number, node in enumerate(told["nodes"])]
    settings = replace(settings, run_id=folder.name)
    asked = Asked((), {place.replica: place.replica for place in places}, settings.windows) if "asked" in told else None
    with Job(settings, asked=asked):
        ray.init(
            address=os.environ["RAY_ADDRESS"],
            runtime_env={"env_vars": {ENV_NAME: os.environ[ENV_NAME]}},
            log_to_driver=False,
        )
        there = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
        run = ray.remote(num_cpus=0, max_retries=0)(loop)
        running = [
            run.options(scheduling_strategy=NodeAffinitySchedulingStrategy(there[str(place.node)], soft=False)).remote(
                place.to_json()
            )
            for place in places
        ]
        ray.get(running)
        print("captured", flush=True)
        then = told.get("then")
        if then == "shutdown":
            ray.shutdown()
        elif then == "wait":
            while len(list(folder.glob("*.manifest.json"))) < len(told["nodes"]):
                time.sleep(0.1)
            print("here while it runs", flush=True)
        elif then:
            while not Path(then).exists():
                time.sleep(0.1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
