"""Makes the pictures and output of docs/reading-a-window.md, and those of the report's page, by this package itself.

    .venv/bin/python docs/pictures/windows.py [--traces ../shared/traces]

Three rollouts run on the CPU, a few minutes in all; two traces of real GPUs are read where they are. The pictures go to
docs/images/, the tables to standard output. The page is drawn by a headless Chromium; `--page` makes nothing else.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLONE = HERE.parents[1]
IMAGES = HERE.parent / "images"
GPU = {"launch-bound": "cuda_nccl_with_config.json.gz", "communication": "cuda_nccl_sampled_rank0.json.gz"}
RANKS = ("cuda_nccl_sampled_rank0.json.gz", "cuda_nccl_sampled_rank1.json.gz")

SCREEN = {"width": 1200, "height": 1560, "deviceScaleFactor": 1, "mobile": False}

REPLICA = """
import os, time, torch
from verl_profiler_conf import decode_loop

pause = 0.02 if os.environ["RANK"] == "0" else 0.06  # the second replica has a slower machine
weights, state = torch.ones(64, 64), torch.ones(4, 64)
torch.set_num_threads(1)
with decode_loop(rows=4) as loop:
    for _ in range(48):
        with loop.iteration():
            state = torch.tanh(state @ weights)
            time.sleep(pause)
"""


def rollout(folder: Path, *arguments: str) -> list[Path]:
    """Roll out on the CPU, and return the traces, the first window first."""
    script = str(CLONE / "examples" / "rollout.py")
    more = ["+profiler=torch_window", "profiler.part_iterations=1000", f"profiler.save_path={folder}"]
    command = [sys.executable, script, *more, f"hydra.run.dir={folder}/run", *arguments]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, check=True)
    return sorted(folder.glob("*.pt.trace.json.gz"), key=lambda path: int(path.name.split("_tokens")[1].split("-")[0]))


def replicas(folder: Path) -> None:
    """Two processes that decode side by side, one of which is slower."""
    window = {"profile_token_start": 8, "profile_token_end": 40, "all_ranks": True, "run_id": "replicas"}
    settings = json.dumps(window | {"save_path": str(folder), "device": "cpu"})
    environ = {**os.environ, "VERL_PROFILER_CONF": settings, "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", REPLICA]
    started = [subprocess.Popen(command, env={**environ, "RANK": str(rank)}, cwd=CLONE) for rank in range(2)]
    if [process.wait() for process in started] != [0, 0]:
        sys.exit("a replica has failed")


def report(*arguments: str | Path) -> None:
    sys.stdout.write(f"\n$ verl-profiler report {' '.join(Path(str(each)).name for each in arguments)}\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", "verl_profiler_conf.tools.cli", "report", *map(str, arguments)]
    if subprocess.run(command, cwd=CLONE, check=False).returncode > 1:  # 1: something is missing, and it says what
        sys.exit(f"no report on {arguments[0]}")


def page(trace: Path, folder: Path) -> None:
    """The upper part of the report's page on a trace, as a browser draws it for light and for dark systems."""
    sys.path.insert(0, str(CLONE / "tests" / "support"))
    from browser import browser  # of the tests, which look at the page in the same way
    from PIL import Image

    shutil.copy(trace, folder)
    command = [sys.executable, "-m", "verl_profiler_conf.tools.cli", "report", trace.name, "--html", "page.html"]
    environ = {**os.environ, "PYTHONPATH": str(CLONE)}
    subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)
    with browser(folder / "chromium") as chromium:
        for scheme in ("light", "dark"):
            shown = chromium.open(folder / "page.html", scheme)
            chromium.call("Emulation.setDeviceMetricsOverride", SCREEN, shown)
            chromium.call("Emulation.setScrollbarsHidden", {"hidden": True}, shown)
            shown.evaluate("new Promise(done => setTimeout(done, 2000))")  # plots follow the size of the screen
            picture = chromium.call("Page.captureScreenshot", {"format": "png"}, shown)["data"]
            few_colours = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(128)
            few_colours.save(IMAGES / f"report-{scheme}.png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=CLONE.parent / "shared" / "traces", help="of real GPUs")
    parser.add_argument("--page", action="store_true", help="only the pictures of the page")
    arguments = parser.parse_args()
    traces = arguments.traces
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if (traces / GPU["communication"]).exists():
            page(traces / GPU["communication"], folder)
        if arguments.page:
            return
        for picture, trace in GPU.items():
            if (traces / trace).exists():
                copy = Path(shutil.copy(traces / trace, folder))
                report(copy, "--top", "4", "--png", IMAGES / f"window-{picture}.png")
        if all((traces / trace).exists() for trace in RANKS):
            report(*(traces / trace for trace in RANKS), "--top", "2")
        steady = rollout(folder / "steady", "profiler.profile_token_start=20", "profiler.profile_token_end=120")
        report(*steady, "--top", "4", "--png", IMAGES / "window-steady.png")
        windows = "profiler.profile_token_windows=[[20,60],[60,660],[660,700]]"
        sizes = ("prompts=16", "response_tokens=702", "model.hidden_size=128")
        early, middle, late = rollout(folder / "growing", windows, *sizes)
        report(middle, "--top", "4", "--png", IMAGES / "window-growing.png")
        report(late, "--against", early, "--top", "4")
        replicas(folder / "replicas")
        report(folder / "replicas", "--top", "2")


if __name__ == "__main__":
    main()
