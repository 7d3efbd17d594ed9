"""Records with torch_npu's profiler on Ascend NPUs. The trace is a directory, which gets its name when it is whole.

torch_npu prints its failures and goes on, so this module checks on disk what it did. Argument names do not follow the
version number of torch_npu, so this module reads signatures and never the version.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.backends.base import Written
from verl_profiler_conf.capture.backends.torch_profiler import running_profiler
from verl_profiler_conf.core.errors import UnavailableError

log = logging.getLogger(__name__)

SUFFIX = "_ascend_pt"
"""The ending that torch_npu uses. Its offline analysis looks for it."""

_ANALYSE = "import sys; from torch_npu.profiler.profiler import analyse; analyse(profiler_path=sys.argv[1])"
_ANALYSIS_LIMIT_S = 1800
_PATH_PARTS = ("_dir_path", "_worker_name", "_export_only_mode")
_LEVELS = {"level0": "Level0", "level1": "Level1", "level2": "Level2", "level_none": "Level_none"}


class AscendProfiler:
    """Records with torch_npu.profiler.

    A capture is two steps of torch_npu's schedule: WARMUP, which `prepare` begins some iterations ahead, then
    RECORD_AND_SAVE. It ends when the schedule steps on. torch_npu warns of incomplete data after any other way.

    Args:
        contents: of `cpu`, `npu`, `memory`, `shapes`, `stack`, `module`. Without `cpu` and `npu`, both are recorded.
        level: `level0` (kernel times), `level1`, `level2` (AI core metrics, details of the runtime), or `level_none`.
        analysis: analyse the data after each capture, in a process of its own.
        save_path: folder for the traces. The raw data is written there too, so that it moves by a rename. None means a
            temporary folder.

    Raises:
        UnavailableError: torch_npu cannot be imported, or it sees no NPU.
    """

    name = "ascend"
    suffix = SUFFIX

    def __init__(
        self,
        *,
        contents: Sequence[str] = (),
        level: str = "level0",
        analysis: bool = False,
        save_path: str | None = None,
    ) -> None:
        try:
            import torch_npu
            from torch_npu import profiler
        except (ImportError, OSError) as error:  # OSError: the loader does not find CANN's libraries
            raise UnavailableError(
                f"device: npu, but torch_npu cannot be imported ({error}); source CANN's set_env.sh"
            ) from error
        if not torch_npu.npu.is_available():
            raise UnavailableError("device: npu, but torch_npu sees no NPU (ASCEND_RT_VISIBLE_DEVICES?)")
        self._npu: Any = torch_npu.npu
        self._profiler: Any = profiler
        self._analysis = analysis
        self._save_path = save_path
        self._level = level
        activity = profiler.ProfilerActivity
        chosen = {"cpu", "npu"} & set(contents) or {"cpu", "npu"}
        self._options: dict[str, Any] = {
            "activities": [getattr(activity, name.upper()) for name in sorted(chosen)],
            "record_shapes": "shapes" in contents,
            "profile_memory": "memory" in contents,
            "with_stack": "stack" in contents,
            "with_modules": "module" in contents,
        }
        self._expects_device = "npu" in chosen
        self._prepared: Any = None
        self._running: Any = None
        self._staging: Path | None = None
        self._others_path: dict[str, Any] = {}

    def busy(self) -> str | None:
        is_ours = self._running is not None or self._prepared is not None
        if not is_ours and getattr(_path_creator(), "is_prof_inited", False):
            return "another torch_npu profiler already runs in this process"
        return running_profiler()

    def prepare(self) -> None:
        if self._prepared is not None or self._running is not None:
            return
        staging = self._staging = self._make_staging()
        creator = _path_creator()
        self._others_path = {name: getattr(creator, name) for name in _PATH_PARTS if hasattr(creator, name)}
        actions = self._profiler.ProfilerAction
        steps = (actions.WARMUP, actions.RECORD_AND_SAVE)
        options = _supported_options(self._profiler.profile, self._options)
        prepared = self._profiler.profile(
            **options,
            schedule=lambda step: steps[step] if step < len(steps) else actions.NONE,
            on_trace_ready=self._profiler.tensorboard_trace_handler(str(staging), analyse_flag=False),
            experimental_config=self._experimental_config(),
        )
        prepared.start()
        self._prepared = prepared

    def start(self) -> None:
        self.prepare()
        running, self._prepared = self._prepared, None
        self._npu.synchronize()
        running.step()  # from WARMUP to RECORD_AND_SAVE
        if self._staging is None or _directory_in(self._staging) is None:
            running.step()  # ends the schedule, or the profiler would stop again when Python frees it
            running.stop()
            self._clean()
            raise RuntimeError(
                "torch_npu's profiler did not start; it has printed why. Usual causes: the job runs under msprof, or "
                "PROFILING_MODE is set. torch_npu records nothing then"
            )
        self._running = running

    def annotate(self, name: str) -> AbstractContextManager[None]:
        if self._running is None:
            return contextlib.nullcontext()
        from torch.profiler import record_function

        return record_function(name)

    def stop(self) -> AscendRecording:
        running, staging = self._running, self._staging
        if running is None or staging is None:
            raise RuntimeError("no recording to stop")
        self._running = self._staging = None
        self._npu.synchronize()  # torch_npu 2.6.0 does not wait, and loses work that is still queued
        running.step()  # leaves RECORD_AND_SAVE: stops recording and writes the data
        running.stop()  # tells torch_npu that no profiler runs any more
        self._give_path_back()
        return AscendRecording(staging, analysis=self._analysis, expects_device=self._expects_device)

    def discard(self) -> None:
        if self._prepared is not None:
            self.start()
        if self._running is not None:
            self.stop().drop()

    def _experimental_config(self) -> Any:
        profiler = self._profiler
        config_type = getattr(profiler, "_ExperimentalConfig", None)
        if config_type is None:
            log.warning("this torch_npu has no _ExperimentalConfig: level=%s has no effect", self._level)
            return None
        metrics = profiler.AiCMetrics
        wanted = {
            "profiler_level": getattr(profiler.ProfilerLevel, _LEVELS[self._level]),
            # torch_npu resets metrics that the level does not support, and warns
            "aic_metrics": metrics.PipeUtilization if self._level in ("level1", "level2") else metrics.AiCoreNone,
            "export_type": profiler.ExportType.Text,  # makes trace_view.json, which any trace viewer opens
        }
        return config_type(**_supported_options(config_type, wanted))

    def _make_staging(self) -> Path:
        if self._save_path is None:
            return Path(tempfile.mkdtemp(prefix="verl-profiler-"))
        folder = Path(self._save_path) / f".ascend-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True, mode=0o750)  # torch_npu refuses a folder that other users can write to
        return folder

    def _give_path_back(self) -> None:
        """Restore the output path. A process has one, and an engine's own profiler, which sets it once, needs it."""
        creator = _path_creator()
        for name, value in self._others_path.items():
            setattr(creator, name, value)
        self._others_path = {}

    def _clean(self) -> None:
        self._give_path_back()
        staging, self._staging = self._staging, None
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


class AscendRecording:
    """Raw data of a finished capture, in a hidden folder on disk."""

    def __init__(self, staging: Path, *, analysis: bool, expects_device: bool) -> None:
        self._staging = staging
        self._analysis = analysis
        self._expects_device = expects_device

    def write(self, path: Path, renames: Mapping[str, str]) -> Written:
        target = path.with_name(path.name + SUFFIX)
        if target.exists():
            raise FileExistsError(f"{target} exists already")
        raw = _directory_in(self._staging)
        if raw is None:
            raise OSError(f"torch_npu left no data in {self._staging}; it has printed why")
        _move_whole(raw, target)
        self.drop()
        notes = []
        if renames:
            notes.append(
                f"{len(renames)} ranges in the trace name more tokens than were made: the manifest's rows are right"
            )
        events = None
        if self._expects_device and not _has_device_data(target):
            events = 0
            notes.append(
                "no device data was recorded; known causes: another profiler (msprof, a second job) uses the NPU, "
                "or CANN refused the configuration and has printed so"
            )
        notes.append(_analyse(target) if self._analysis else _how_to_analyse(target))
        size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        return Written(target, size, events, "; ".join(notes))

    def drop(self) -> None:
        """Remove the raw data that is left."""
        shutil.rmtree(self._staging, ignore_errors=True)


def _path_creator() -> Any:
    """The one object by which torch_npu makes output folders; None where this release has none of that name."""
    module = sys.modules.get("torch_npu.profiler._profiler_path_creator")
    creator = getattr(module, "ProfPathCreator", None)
    with contextlib.suppress(TypeError):
        return creator() if creator is not None else None
    return None


def _supported_options(call: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    known = inspect.signature(call).parameters
    missing = sorted(name for name, value in wanted.items() if name not in known and value)
    if missing:
        log.warning("this torch_npu has no %s: the capture goes on without", ", ".join(missing))
    return {name: value for name, value in wanted.items() if name in known}


def _directory_in(staging: Path) -> Path | None:
    return next((entry for entry in sorted(staging.glob(f"*{SUFFIX}")) if entry.is_dir()), None)


def _move_whole(raw: Path, target: Path) -> None:
    try:
        raw.rename(target)
    except OSError:  # another file system: copy beside the target, so that the final name still appears in one step
        beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            shutil.copytree(raw, beside)
            beside.rename(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _has_device_data(directory: Path) -> bool:
    return any(file.is_file() and file.stat().st_size for file in directory.glob("PROF_*/device_*/data/*"))


def _how_to_analyse(directory: Path) -> str:
    return (
        "to get trace_view.json, run where torch_npu is installed: python -c "
        f"\"from torch_npu.profiler.profiler import analyse; analyse(profiler_path='{directory}')\""
    )


def _analyse(directory: Path) -> str:
    """Analyse the data in a process of its own, because torch_npu's parser can crash its process."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ANALYSE, str(directory)],
            capture_output=True,
            text=True,
            timeout=_ANALYSIS_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the analysis did not finish ({type(error).__name__}); {_how_to_analyse(directory)}"
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        return f"the analysis failed ({last}); {_how_to_analyse(directory)}"
    return "analysed"
