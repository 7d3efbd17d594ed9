"""The real Python layer of a torch_npu release, with everything native faked: neither an NPU nor CANN is needed.

    python npu_without_native.py FOLDER SCENARIO OUT [OPTIONS]

FOLDER holds the release's `torch_npu/` package (its .py files are enough). Runs in a process of its own, since it puts
a made-up torch_npu into sys.modules. Prints one JSON object: what the scenario saw, and which native calls were made.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
DEVICE_DATA = True


class Activity(enum.Enum):
    CPU = 1
    NPU = 2


class Arguments:
    """Keeps what it was made from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


class Native(types.ModuleType):
    """Any function that is asked for exists, notes that it was called, and answers 0."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            CALLS.append((name, args, kwargs))
            if name == "_init_profiler" and DEVICE_DATA:
                data = Path(args[0]) / "PROF_000001" / "device_0" / "data" / "task_time.slice"
                data.parent.mkdir(parents=True)
                data.write_bytes(b"kernels")
            return {"_get_syscnt_enable": False, "_get_freq": 100}.get(name, 0)

        return call


def install(folder: Path, *, npus: int = 1) -> None:
    """Make `import torch_npu` find the release below `folder`, on a machine that seems to have `npus` NPUs."""
    import torch

    base = folder / "torch_npu"

    def package(name: str, path: Path | None = None, **content: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__path__ = [str(path)] if path else []
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        return module

    def synchronize() -> None:
        CALLS.append(("synchronize", (), {}))

    package("torch_npu", base, __version__="0")
    core = package("torch_npu._C")
    native: Any = Native("torch_npu._C._profiler")
    native.ProfilerActivity = Activity
    native._ExperimentalConfig = type("_ExperimentalConfig", (Arguments,), {})
    native.NpuProfilerConfig = type("NpuProfilerConfig", (Arguments,), {})
    native._supported_npu_activities = lambda: set(Activity)
    sys.modules["torch_npu._C._profiler"] = native
    core._profiler = native  # type: ignore[attr-defined]

    mstx = types.SimpleNamespace(range_start=lambda *_, **__: 1, range_end=lambda *_, **__: None)
    event = type(
        "Event", (), dict.fromkeys(("record", "wait", "query", "elapsed_time", "synchronize"), lambda *_: None)
    )
    npu = package(
        "torch_npu.npu",
        base / "npu",
        current_stream=lambda *_: None,
        mstx=mstx,
        _lazy_init=lambda: None,
        Event=event,
        is_available=lambda: npus > 0,
        synchronize=synchronize,
    )
    package("torch_npu.npu.mstx", mstx=mstx)
    npu.mstx = mstx  # type: ignore[attr-defined]
    package("torch_npu.utils", base / "utils", _should_print_warning=lambda: True)
    package("torch_npu.utils.collect_env", get_cann_version=lambda *_: "none", get_torch_npu_version=lambda *_: "none")
    torch.npu = types.SimpleNamespace(synchronize=synchronize, is_available=lambda: npus > 0)  # type: ignore[attr-defined]
    importlib.import_module("torch_npu.profiler")


def native_config() -> dict[str, Any]:
    """What the native layer was told to record."""
    start = next(args for name, args, _ in CALLS if name == "_start_profiler")
    (_, shapes, memory, stack, _, modules, experimental), activities = start[0].args, start[1]
    return {
        "level": experimental.kwargs["trace_level"],
        "metrics": experimental.kwargs["metrics"],
        "shapes": shapes,
        "memory": memory,
        "stack": stack,
        "modules": modules,
        "activities": sorted(activity.name for activity in activities),
    }


def capture(out: Path, *, read_config: bool = True, **options: Any) -> dict[str, Any]:
    from verl_profiler_conf.capture.backends.ascend import AscendProfiler

    profiler = AscendProfiler(save_path=str(out), **options)
    seen: dict[str, Any] = {"busy before": profiler.busy()}
    profiler.start()
    seen["hidden while it records"] = all(entry.name.startswith(".") for entry in out.iterdir())
    with profiler.annotate("response_tokens[0:1) iter=0 reqs=1"):
        CALLS.append(("iteration", (), {}))
    recording = profiler.stop()
    CALLS.append(("written", (), {}))
    written = recording.write(out / "stem", {})
    seen |= {
        "path": str(written.path),
        "bytes": written.bytes,
        "events": written.device_events,
        "note": written.note,
        "left": sorted(entry.name for entry in out.iterdir()),
        "files": sorted(entry.name for entry in (out / "stem_ascend_pt").iterdir()),
        "busy after": profiler.busy(),
        "config": native_config() if read_config else None,
    }
    return seen


def without_device_data(out: Path) -> dict[str, Any]:
    global DEVICE_DATA
    DEVICE_DATA = False
    return capture(out)


def without(out: Path, name: str) -> dict[str, Any]:
    """A capture where torch_npu lacks one of the private parts that are read."""
    import torch_npu
    from torch_npu.profiler import _profiler_path_creator as creator

    with contextlib.suppress(AttributeError):  # a release may lack it by itself
        if name == "_ExperimentalConfig":
            del torch_npu.profiler._ExperimentalConfig
        elif name == "is_prof_inited":
            del creator.ProfPathCreator().is_prof_inited
        else:
            sys.modules[creator.__name__] = types.ModuleType(creator.__name__)
    return capture(out, read_config=name != "_ExperimentalConfig")


def twice(out: Path) -> dict[str, Any]:
    from verl_profiler_conf.capture.backends.ascend import AscendProfiler

    profiler = AscendProfiler(save_path=str(out))
    for name in ("first", "second"):
        profiler.start()
        profiler.stop().write(out / name, {})
    profiler.start()
    profiler.discard()
    return {"left": sorted(entry.name for entry in out.iterdir())}


def over_an_older_one(out: Path) -> dict[str, Any]:
    from verl_profiler_conf.capture.backends.ascend import AscendProfiler

    (out / "stem_ascend_pt").mkdir()
    (out / "stem_ascend_pt" / "old").touch()
    profiler = AscendProfiler(save_path=str(out))
    profiler.start()
    recording = profiler.stop()
    refused = False
    with contextlib.suppress(FileExistsError):
        recording.write(out / "stem", {})
        refused = True
    recording.write(out / "other", {})
    return {"refused": not refused, "left": sorted(str(p.relative_to(out)) for p in out.glob("*/*") if p.name == "old")}


def beside_another(out: Path) -> dict[str, Any]:
    import torch_npu

    from verl_profiler_conf.capture.backends.ascend import AscendProfiler

    handler = torch_npu.profiler.tensorboard_trace_handler(str(out), analyse_flag=False)
    other = torch_npu.profiler.profile(on_trace_ready=handler)
    other.start()
    profiler = AscendProfiler(save_path=str(out))
    during = profiler.busy()
    other.stop()
    return {"during": during, "after": profiler.busy()}


def prepared_ahead(out: Path) -> dict[str, Any]:
    """A capture that is prepared some iterations ahead; then one that is prepared and not wanted."""
    from verl_profiler_conf.capture.backends.ascend import AscendProfiler

    profiler = AscendProfiler(save_path=str(out))
    profiler.prepare()
    profiler.prepare()
    CALLS.append(("iteration ahead", (), {}))
    busy = profiler.busy()
    profiler.start()
    CALLS.append(("iteration", (), {}))
    profiler.stop().write(out / "stem", {})
    wanted = [name for name, _, _ in CALLS]
    profiler.prepare()
    profiler.discard()
    profiler.discard()
    left = sorted(entry.name for entry in out.iterdir())
    return {"wanted": wanted, "left": left, "busy while prepared": busy, "busy after": profiler.busy()}


def path_of_another(out: Path) -> dict[str, Any]:
    """An engine makes its handler once, before the capture, and profiles after it."""
    import torch_npu

    from verl_profiler_conf.capture.backends.ascend import AscendProfiler

    (out / "engine").mkdir(mode=0o750)
    (out / "ours").mkdir(mode=0o750)
    handler = torch_npu.profiler.tensorboard_trace_handler(str(out / "engine"), "worker", analyse_flag=False)
    profiler = AscendProfiler(save_path=str(out / "ours"))
    profiler.start()
    profiler.stop().write(out / "ours" / "stem", {})
    engine = torch_npu.profiler.profile(on_trace_ready=handler)
    engine.start()
    engine.stop()
    return {
        "engine": sorted(entry.name for entry in (out / "engine").iterdir()),
        "ours": sorted(entry.name for entry in (out / "ours").iterdir()),
    }


def under_msprof(out: Path) -> dict[str, Any]:
    from torch_npu.profiler.analysis.prof_common_func._constant import Constant

    from verl_profiler_conf.capture.backends.ascend import AscendProfiler

    name = getattr(Constant, "MSPROF_DYNAMIC_ENV", None)
    if name is None:
        return {"skip": "this release does not look for msprof"}
    import os

    os.environ[name] = "dynamic"
    try:
        AscendProfiler(save_path=str(out)).start()
    except RuntimeError as error:
        return {"error": str(error), "left": [entry.name for entry in out.iterdir()]}
    return {"error": None}


SCENARIOS = {
    function.__name__: function
    for function in (
        capture,
        without,
        without_device_data,
        twice,
        over_an_older_one,
        beside_another,
        prepared_ahead,
        path_of_another,
        under_msprof,
    )
}


def main() -> None:
    folder, scenario, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    options = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        install(folder)
        seen = SCENARIOS[scenario](out, **options)
    seen["calls"] = [name for name, _, _ in CALLS]
    seen["said"] = said.getvalue()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
