"""Detection: from what is there, without touching it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from verl_profiler_conf.capture.backends import detect, detect_device


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, cuda="12.8", hip=None)


def _torch(monkeypatch: pytest.MonkeyPatch, **version: str | None) -> None:
    torch = ModuleType("torch")
    torch.version = SimpleNamespace(**version)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)


def _torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))


@pytest.mark.parametrize("asked", ["cuda", "npu", "cpu"])
def test_what_is_asked_for_is_taken_at_its_word(asked: str, dev: Path) -> None:
    assert detect_device(asked, environ={}, dev=dev) == asked


@pytest.mark.usefixtures("cuda_torch")
class TestCudaWithFakeDeviceNodes:
    def test_a_node_and_a_torch_for_it(self, dev: Path) -> None:
        (dev / "nvidia0").touch()
        assert detect_device(environ={}, dev=dev) == "cuda"

    def test_no_node(self, dev: Path) -> None:
        (dev / "nvidia-modeset").touch()
        assert detect_device(environ={}, dev=dev) == "cpu"

    @pytest.mark.parametrize("hidden", ["", " ", "-1", "-1,0", "NoDevFiles"])
    def test_hidden_by_the_environment(self, hidden: str, dev: Path) -> None:
        (dev / "nvidia0").touch()
        assert detect_device(environ={"CUDA_VISIBLE_DEVICES": hidden}, dev=dev) == "cpu"

    @pytest.mark.parametrize("shown", ["0", "3,1", "GPU-6b2d", "MIG-1", "0,-1"])
    def test_shown_by_the_environment(self, shown: str, dev: Path) -> None:
        (dev / "nvidia0").touch()
        assert detect_device(environ={"CUDA_VISIBLE_DEVICES": shown}, dev=dev) == "cuda"

    def test_control_node_alone_and_no_nvml(self, dev: Path) -> None:
        (dev / "nvidiactl").touch()
        assert detect_device(environ={}, dev=dev) == "cpu"


def test_a_gpu_and_a_torch_for_cpu(monkeypatch: pytest.MonkeyPatch, dev: Path) -> None:
    _torch(monkeypatch, cuda=None, hip=None)
    (dev / "nvidia0").touch()
    assert detect_device(environ={}, dev=dev) == "cpu"


@pytest.mark.parametrize(("hidden", "found"), [({}, "cuda"), ({"HIP_VISIBLE_DEVICES": ""}, "cpu")])
def test_rocm_answers_to_cuda(monkeypatch: pytest.MonkeyPatch, dev: Path, hidden: dict[str, str], found: str) -> None:
    _torch(monkeypatch, cuda=None, hip="6.2")
    (dev / "kfd").touch()
    assert detect_device(environ=hidden, dev=dev) == found


class TestXpuWithFakeDeviceNodes:
    @pytest.mark.parametrize(
        ("built_for", "node", "found"), [("xpu", True, True), ("cuda", True, False), ("xpu", False, False)]
    )
    def test_a_render_node_and_a_torch_for_it(
        self, built_for: str, node: bool, found: bool, monkeypatch: pytest.MonkeyPatch, dev: Path
    ) -> None:
        _torch(monkeypatch, **{"cuda": None, "hip": None, "xpu": None, built_for: "1"})
        if node:
            (dev / "dri").mkdir()
            (dev / "dri" / "renderD128").touch()
        assert detect.has_xpu(dev) is found


class TestNpuWithFakeDeviceNodes:
    def test_a_node_and_torch_npu(self, monkeypatch: pytest.MonkeyPatch, dev: Path) -> None:
        _torch_npu(monkeypatch)
        (dev / "davinci0").touch()
        assert detect_device(environ={}, dev=dev) == "npu"

    def test_the_manager_alone_is_no_npu(self, monkeypatch: pytest.MonkeyPatch, dev: Path) -> None:
        _torch_npu(monkeypatch)
        (dev / "davinci_manager").touch()
        assert detect_device(environ={}, dev=dev) == "cpu"

    def test_without_torch_npu(self, monkeypatch: pytest.MonkeyPatch, dev: Path) -> None:
        monkeypatch.setattr(detect, "_spec", lambda _: None)
        monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
        (dev / "davinci0").touch()
        assert detect_device(environ={}, dev=dev) == "cpu"

    def test_hidden_by_the_environment(self, monkeypatch: pytest.MonkeyPatch, dev: Path) -> None:
        _torch_npu(monkeypatch)
        (dev / "davinci0").touch()
        assert detect_device(environ={"ASCEND_RT_VISIBLE_DEVICES": ""}, dev=dev) == "cpu"


@pytest.mark.parametrize(
    ("text", "built_for"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "cuda"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2.4'\n", "hip"),
        ("cuda = '11.8'\n", "cuda"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", None),
        ("", None),
    ],
)
def test_torchs_version_file_is_read_without_importing_it(
    text: str, built_for: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "version.py").write_text(text)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert detect.torch_built_for() == built_for
    assert "torch" not in sys.modules


def test_imports_neither_torch_nor_an_engine() -> None:
    code = (
        "import sys; from verl_profiler_conf.capture.backends import detect_device; detect_device();"
        "print([name for name in ('torch', 'torch_npu', 'vllm') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
