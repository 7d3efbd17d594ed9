"""The package's own sources: nothing evaluates text, unpickles what others wrote, or opens a connection."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from clone import CLONE

SOURCES = [path for top in ("verl_profiler_conf", "hydra_plugins") for path in sorted((CLONE / top).rglob("*.py"))]

CALLS = {
    *("eval", "exec", "compile", "__import__", "execfile"),
    *("os.system", "os.popen", "os.execv", "os.execve", "os.spawnv"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads"),
    *("torch.load", "numpy.load", "np.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all"),
    *("socket.socket", "socket.create_connection", "socket.create_server", "asyncio.open_connection"),
    *("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_output", "subprocess.getoutput"),
    *("hydra.utils.instantiate", "hydra.utils.call", "instantiate"),
}
"""What turns text into code, bytes into objects, or an address into a connection."""

MODULES = {
    *(
        "pickle",
        "cPickle",
        "dill",
        "cloudpickle",
        "marshal",
        "shelve",
        "joblib",
        "jsonpickle",
        "code",
        "codeop",
        "runpy",
    ),
    *("socket", "socketserver", "ssl", "http", "urllib.request", "ftplib", "smtplib", "telnetlib", "xmlrpc", "asyncio"),
    *("requests", "httpx", "aiohttp", "urllib3", "zmq", "grpc", "subprocess", "pty", "multiprocessing.connection"),
}
"""Modules whose business that is."""

ALLOWED = {
    ("verl_profiler_conf/capture/backends/ascend.py", "subprocess"): "torch_npu's parser, in a process of its own",
    ("verl_profiler_conf/capture/backends/ascend.py", "subprocess.run"): "a fixed program; the folder is an argument",
    ("verl_profiler_conf/capture/backends/memory.py", "pickle"): "writes torch's own format; reads none",
    ("verl_profiler_conf/capture/claims.py", "socket"): "the machine's name",
    ("verl_profiler_conf/capture/manifest.py", "socket"): "the machine's name",
    ("verl_profiler_conf/engines/vllm/shutdown.py", "multiprocessing.connection"): "waits for processes to end",
    ("verl_profiler_conf/launch/report.py", "subprocess"): "the report's page, in a process of its own",
    ("verl_profiler_conf/launch/report.py", "subprocess.Popen"): "a fixed program; folder and run are arguments",
    (
        "verl_profiler_conf/tools/plan/processes.py",
        "subprocess",
    ): "the launch that is typed after `--`",
    ("verl_profiler_conf/tools/plan/processes.py", "subprocess.Popen"): "a list of arguments, no shell",
    ("verl_profiler_conf/tools/generate/file_memory.py", "pickle"): "copies of configs, in memory",
    ("verl_profiler_conf/tools/generate/file_memory.py", "pickle.loads"): "what this process has pickled in memory",
    ("verl_profiler_conf/tools/serving.py", "http"): "`open`: one file, once, on 127.0.0.1",
}
"""File, name -> why it is harmless. Who adds a line says why in SECURITY.md too."""


def found_in(source: str) -> Iterator[str]:
    """Names out of `CALLS` and `MODULES` that a source uses, whatever it calls them."""
    names: dict[str, str] = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield from _modules(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from _modules(node.module)
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from _modules(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            whole = _dotted(node)
            first, dot, rest = whole.partition(".")
            real = names.get(first, first) + dot + rest
            if real in CALLS or (isinstance(node, ast.Name) and whole in CALLS):
                yield real
        elif isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
            yield node.arg


def _modules(name: str) -> Iterator[str]:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        if ".".join(parts[:end]) in MODULES:
            yield ".".join(parts[:end])
            return


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_nothing_evaluates_unpickles_or_connects_outside_the_list() -> None:
    found = {
        (path.relative_to(CLONE).as_posix(), name) for path in SOURCES for name in found_in(path.read_text("utf-8"))
    }
    assert found == set(ALLOWED)
    assert len(SOURCES) > 100


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("eval('1')", "eval"),
        ("run = exec", "exec"),
        ("import pickle", "pickle"),
        ("import pickle as p\np.loads(b'')", "pickle.loads"),
        ("from pickle import loads as read\nread(b'')", "pickle.loads"),
        ("def f():\n    import torch\n    torch.load('x')", "torch.load"),
        ("import yaml\nyaml.load(open('x'))", "yaml.load"),
        ("import os\nos.system('x')", "os.system"),
        ("from urllib import request", "urllib.request"),
        ("import http.client", "http"),
        ("run('x', shell=True)", "shell"),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", "allow_pickle"),
    ],
)
def test_the_scan_finds(source: str, found: str) -> None:
    assert found in set(found_in(source))


@pytest.mark.parametrize("source", ["import re\nre.compile('x')", "import yaml\nyaml.safe_load('x')", "'eval(x)'"])
def test_the_scan_leaves_alone(source: str) -> None:
    assert set(found_in(source)) == set()
