"""What the package costs a Hydra app that does not use it: whole processes, with the package and without, in turn.

    python benchmarks/startup.py [--pairs 40]

Two folders hold the same installed packages; this package is in one of them only. The same empty app runs with each
folder as its only site-packages, and the differences pair by pair are summed up. The yardstick is what Hydra spends on
importing the plugins that it brings itself, by its own statistics.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]
OURS = ("verl_profiler_conf", "__editable__.verl_profiler_conf")
BUNDLED = "hydra._internal.core_plugins."
PLUGIN = "hydra_plugins.verl_profiler_conf"

APP = """\
import hydra


@hydra.main(version_base=None, config_path=None)
def main(_):
    pass


main()
"""

STATS = """
import json
import hydra.main
from hydra.core.plugins import Plugins

print(json.dumps(Plugins.instance().get_stats().modules_import_time))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="pairs of runs (default 40)")
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "app.py").write_text(APP)
        (root / "stats.py").write_text(STATS)
        without, with_us = make_site(root / "without", package=False), make_site(root / "with", package=True)
        for site in (without, with_us):  # compiles what is not compiled yet
            run(root, site, "app.py")
            run(root, site, "app.py")
        wall, cpu = measure(root, without, with_us, pairs)
        ours, bundled = import_times(root, with_us, pairs)
    print(f"an empty Hydra app, {pairs} pairs of whole processes, milliseconds: lower quartile, median, upper quartile")
    for name, values in (("without the package, wall", wall[0]), ("without the package, CPU", cpu[0])):
        print(f"  {name:<42} {spread(values)}")
    for name, difference in (("the package, wall (paired difference)", wall), ("the package, CPU", cpu)):
        print(f"  {name:<42} {spread(differences(*difference))}")
    print("imports by Hydra's own statistics, milliseconds")
    print(f"  {'the plugin of this package':<42} {spread(ours)}")
    print(f"  {'the plugins that Hydra brings':<42} {spread(bundled)}")
    print(f"  ratio of the medians                       {statistics.median(ours) / statistics.median(bundled):.3f}")
    cost = statistics.median(differences(*cpu)) / statistics.median(bundled)
    print(f"  the package (CPU) to the plugins that Hydra brings: {cost:.3f}")


def make_site(folder: Path, *, package: bool) -> Path:
    """A folder with links to all that is installed, with this package or without."""
    (folder / "hydra_plugins").mkdir(parents=True)
    for place in installed_places():
        for entry in sorted(place.iterdir()):
            if entry.name == "hydra_plugins":
                for plugin in entry.iterdir():
                    link(plugin, folder / "hydra_plugins" / plugin.name)
            elif not entry.name.startswith(OURS) and entry.suffix != ".pth":
                link(entry, folder / entry.name)
    if package:
        link(CLONE / "hydra_plugins" / "verl_profiler_conf", folder / "hydra_plugins" / "verl_profiler_conf")
        link(CLONE / "verl_profiler_conf", folder / "verl_profiler_conf")
        for place in installed_places():
            for entry in place.glob("verl_profiler_conf-*.dist-info"):
                link(entry, folder / entry.name)
    return folder


def installed_places() -> list[Path]:
    return [Path(entry) for entry in sys.path if entry.endswith("site-packages")]


def link(source: Path, target: Path) -> None:
    if source.name not in ("__pycache__",) and not target.exists():
        target.symlink_to(source)


def measure(
    root: Path, without: Path, with_us: Path, pairs: int
) -> tuple[tuple[list[float], list[float]], tuple[list[float], list[float]]]:
    """Wall and CPU milliseconds, each without the package and with it. Each pair starts with the other one."""
    wall: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        for which in order:
            took, used = run(root, (without, with_us)[which], "app.py")
            wall[which].append(took)
            cpu[which].append(used)
    return wall, cpu


def run(root: Path, site: Path, script: str) -> tuple[float, float]:
    """Wall and CPU milliseconds of one process."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-S", script, "hydra.run.dir=run"], cwd=root, env=environment(site))
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return took * 1e3, (usage.ru_utime + usage.ru_stime) * 1e3


def import_times(root: Path, site: Path, runs: int) -> tuple[list[float], list[float]]:
    """Milliseconds that Hydra spent on importing this package's plugin, and on its own."""
    import json

    ours, bundled = [], []
    for _ in range(runs):
        command = [sys.executable, "-S", "stats.py"]
        done = subprocess.run(command, cwd=root, env=environment(site), capture_output=True, text=True, check=True)
        times = json.loads(done.stdout)
        ours.append(times[PLUGIN] * 1e3)
        bundled.append(sum(took for name, took in times.items() if name.startswith(BUNDLED)) * 1e3)
    return ours, bundled


def environment(site: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VERL_PROFILER"))}
    return {**kept, "PYTHONPATH": str(site)}


def differences(without: Sequence[float], with_us: Sequence[float]) -> list[float]:
    return [after - before for before, after in zip(without, with_us, strict=True)]


def spread(values: Sequence[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{low:8.2f} {median:8.2f} {high:8.2f}"


if __name__ == "__main__":
    main()
