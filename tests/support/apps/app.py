"""An ordinary Hydra app; what its task does is in the config. It knows nothing of profiling."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

BASES = {"none": {"version_base": None}, "omitted": {}}
BASE = os.environ.get("APP_VERSION_BASE", "none")

CHILD = "import os; print('CHILD', os.environ.get('VERL_PROFILER_CONF'))"


def decode(cfg: DictConfig) -> None:
    """A decode loop of the app's own: each iteration makes one token of both rows."""
    from verl_profiler_conf.engines.loop import decode_loop

    with decode_loop(rows=2) as loop:
        for token in range(cfg.tokens):
            with loop.iteration():
                torch = sys.modules.get("torch")  # the capture's: this app needs none
                sum(range(1000)) if torch is None else torch.ones(8).sum()
            if token == cfg.at:
                leave(cfg.leave)


def leave(how: str) -> None:
    if how == "raise":
        raise LookupError("the job's own error")
    if how == "exit":
        sys.exit(7)
    if how == "interrupt":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs without it
        os.kill(os.getpid(), signal.SIGINT)
    if how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)


@hydra.main(config_path="conf", config_name="plain", **BASES.get(BASE, {"version_base": BASE}))
def main(cfg: DictConfig) -> None:
    report = {
        "job": os.environ.get("VERL_PROFILER_CONF"),
        "cwd": str(Path.cwd()),
        "torch": "torch" in sys.modules,
        "cfg": OmegaConf.to_container(cfg),
    }
    # One write: the launcher's other processes print at the same time.
    sys.stdout.write(f"TASK {json.dumps(report)}\n")
    sys.stdout.flush()
    if cfg.get("child"):
        print(subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout)
    if cfg.get("tokens"):
        decode(cfg)
    elif cfg.get("leave"):
        leave(cfg.leave)


if __name__ == "__main__":
    main()
    print("AFTER", json.dumps({"job": os.environ.get("VERL_PROFILER_CONF")}))
