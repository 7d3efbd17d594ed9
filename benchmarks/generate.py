"""Flattened references of verl: its script, one Python process per file, beside `verl-profiler generate`.

    python benchmarks/generate.py [--repeat N]

Both make the four files that verl 0.9.1 commits, in turn, so that a busy machine slows both. A third way is the command
without its memory of the files that it has read: what that memory is worth. What counts is processor time; medians of
the repeats are shown, and the median of the differences and ratios within a repeat. The files are compared with verl's,
byte for byte.
"""

from __future__ import annotations

import argparse
import operator
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

VERSION = "0.9.1"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-profiler-conf" / "wheels"
ENGINES = {
    "": "",
    "megatron_": "model_engine=megatron",
    "veomni_": "model_engine=veomni",
    "torchtitan_": "model_engine=torchtitan",
}

# what verl's scripts/print_cfg.py comes down to, without what plugins installed here (this package too) would cost it
PRINT_CFG = """\
import sys
sys.modules["hydra_plugins"] = None
import hydra
@hydra.main(config_path={folder!r}, config_name="ppo_trainer", version_base=None)
def main(config):
    pass
main()
"""

# the command, reading each file again for each composition
WITHOUT_MEMORY = """\
import contextlib, sys
from verl_profiler_conf.tools.cli import main
from verl_profiler_conf.tools.generate.file_memory import FileMemory
FileMemory.in_use = lambda self: contextlib.nullcontext()
sys.exit(main(sys.argv[1:]))
"""

SPEC = """\
configs: {folder}
config_name: ppo_trainer
first_key: actor_rollout_ref
header: |
  # This reference configration yaml is automatically generated via 'scripts/generate_trainer_config.sh'
  # in which it invokes 'python3 scripts/print_cfg.py --cfg job {{overrides}}' to flatten the \
'verl/trainer/config/{{config_name}}.yaml' config fields into a single file.
  # Do not modify this file directly.
  # The file is usually only for reference and never used.
files:
"""


@dataclass
class Cost:
    """Of one command: seconds of the clock, and of the processor with its children."""

    wall: float
    cpu: float


@dataclass
class _Way:
    """One way to make the files, and what each run of it cost."""

    name: str
    command: list[str]
    costs: list[Cost] = field(default_factory=list)

    def run(self) -> None:
        self.costs.append(_run(self.command))


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description="Time to make verl's four reference configs.")
    parser.add_argument("--repeat", type=int, default=9, help="runs of each, in turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        folder = _configs(work)
        committed = {path.name: path.read_bytes() for path in folder.glob("_generated_*.yaml")}
        spec = _spec(work, folder)
        script = _Way("a process per file (verl)", _their_script(work, folder))
        command = _Way(
            "verl-profiler generate", [sys.executable, "-m", "verl_profiler_conf.tools.cli", "generate", spec]
        )
        forgetful = _Way("  reading files again", [sys.executable, "-c", WITHOUT_MEMORY, "generate", spec])
        for _ in range(arguments.repeat):
            script.run()
            for way in (command, forgetful):
                for path in work.glob("_generated_*.yaml"):
                    path.unlink()
                way.run()
                made = {path.name: path.read_bytes() for path in work.glob("_generated_*.yaml")}
                assert made == committed, "not what verl commits"
    print(f"verl {VERSION}, {len(committed)} reference configs, the same bytes; medians of {arguments.repeat} runs")
    print(f"{'':32} {'cpu s':>8} {'wall s':>8}")
    for way in (script, command, forgetful):
        cpu, wall = (statistics.median(getattr(cost, unit) for cost in way.costs) for unit in ("cpu", "wall"))
        print(f"{way.name:32} {cpu:8.2f} {wall:8.2f}")
    for title, other, compare in (
        ("verl's script to the command", script, operator.truediv),
        ("worth of reading files once, s", forgetful, operator.sub),
    ):
        pairs = list(zip(other.costs, command.costs, strict=True))
        cpu = statistics.median(compare(theirs.cpu, ours.cpu) for theirs, ours in pairs)
        wall = statistics.median(compare(theirs.wall, ours.wall) for theirs, ours in pairs)
        print(f"{title:32} {cpu:8.2f} {wall:8.2f}")


def _configs(work: Path) -> Path:
    wheel = CACHE / f"verl-{VERSION}-py3-none-any.whl"
    if not wheel.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"verl=={VERSION}", "-d", str(CACHE)]
        subprocess.run(command, check=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("verl/") and name.endswith(".yaml")]
        archive.extractall(work / "wheel", names)
    return work / "wheel" / "verl" / "trainer" / "config"


def _their_script(work: Path, folder: Path) -> list[str]:
    (work / "print_cfg.py").write_text(PRINT_CFG.format(folder=str(folder)))
    lines = [f"{sys.executable} {work}/print_cfg.py --cfg job {override} > /dev/null" for override in ENGINES.values()]
    return ["bash", "-c", "\n".join(lines)]


def _spec(work: Path, folder: Path) -> str:
    files = [
        f"- {{output: {work}/_generated_ppo_{engine}trainer.yaml, overrides: [{override}]}}\n"
        for engine, override in ENGINES.items()
    ]
    spec = work / "spec.yaml"
    spec.write_text(SPEC.format(folder=folder) + "".join(files))
    return str(spec)


def _run(command: list[str]) -> Cost:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


if __name__ == "__main__":
    main()
