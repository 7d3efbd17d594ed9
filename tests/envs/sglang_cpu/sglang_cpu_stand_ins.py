"""Lets the real SGLang run on a machine with no GPU: names for the packages it imports and never needs there.

For tests only. SGLang imports Triton and native kernel packages at start, also when every kernel that it then runs on
the CPU is torch's own. `install` makes those imports succeed. What they give can be imported, subclassed, named in an
annotation and used as a decorator; a kernel that is really launched raises, so no test can pass on a made-up result.

The environment's path file calls `install` when Python starts, in every process of the engine.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import sglang_cpu_kernels

KERNELS_ONLY = frozenset({"sgl_kernel"})
"""Packages that hold nothing but native functions: a call is always a launch, never a decorator at work."""

ABSENT = frozenset({"soundfile", "torchao", "torchaudio", "torchvision", "triton", "xgrammar"}) | KERNELS_ONLY

TORCH_DECIDES = ("torch._inductor.runtime.triton_compat", "torch._inductor.select_algorithm")
"""Where torch looks for Triton once and remembers the answer, which here has to be "no"."""


def install() -> None:
    """Serve the absent packages from now on, in this process."""
    if not any(isinstance(finder, AbsentPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, AbsentPackages())


class AbsentPackages(MetaPathFinder, Loader):
    """Finds every module of the absent packages, and makes each of them empty but for stand-ins."""

    def __init__(self) -> None:
        self.torch_has_decided = False
        self.torch_is_deciding = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in ABSENT:
            return None
        if package == "triton" and not self.torch_has_decided:
            if self.torch_is_deciding:
                # not None: a torch built for CUDA has brought the real one along
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            self._let_torch_decide()
        return ModuleSpec(name, self, is_package=True)

    def _let_torch_decide(self) -> None:
        self.torch_is_deciding = True
        looks = importlib.import_module("torch.utils._triton")
        looks.has_triton_package()
        looks.has_triton()
        for name in TORCH_DECIDES:
            importlib.import_module(name)
        self.torch_has_decided = True

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        given = {"__version__": "3.6.0", "__file__": "<stand-in>", **WITH_A_MEANING.get(module.__name__, {})}
        vars(module).update(given)
        for kernel in sglang_cpu_kernels.KERNELS.get(module.__name__, ()):
            vars(module)[kernel.__name__] = kernel
        if module.__name__ == "triton":
            vars(module)["runtime"] = importlib.import_module("triton.runtime")


class AbsentModule(ModuleType):
    """A module in which every name exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = stand_in(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class StandInType(type):
    """What stands for a function, a class or a constant alike: a class, since only a class can be all of them.

    A subclass that SGLang derives from one is an ordinary class again.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "absent" not in vars(cls):
            return super().__call__(*args, **kwargs)
        name = vars(cls)["absent"]
        if name.partition(".")[0] in KERNELS_ONLY:
            raise NotImplementedError(f"{name} was called, and is only a stand-in here")
        decorated = decorates(args, kwargs)
        return Result(name) if decorated is None else decorated

    def __getitem__(cls, grid: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} was launched as a kernel, and is only a stand-in here")

    def __or__(cls, other: Any) -> Any:
        return cls  # in `A | None`, which only describes

    __ror__ = __or__


class Result:
    """What calling a stand-in gave: a decorator with its arguments bound, or a value that nobody may look into."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorated = decorates(args, kwargs)
        if decorated is None:
            raise NotImplementedError(f"{self._name}(...) was called, and is only a stand-in here")
        return decorated

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{self._name}.{name}")


def stand_in(name: str) -> StandInType:
    return StandInType(name, (), {"absent": name, "__module__": __name__})


def decorates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function or class that a call decorates, which stays as it is; None when the call is no decoration."""
    if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], StandInType):
        return args[0]
    return None


class NoDriver:
    """Triton's driver on a machine without one."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("0 active drivers")


WITH_A_MEANING: dict[str, dict[str, Any]] = {
    "triton": {
        "cdiv": lambda a, b: -(-a // b),
        "next_power_of_2": lambda n: 1 << max(0, (n - 1).bit_length()),
    },
    "triton.runtime": {"driver": NoDriver()},
    "xgrammar": {"StructuralTag": dict},  # pydantic makes a schema of it
}
"""The few names whose value SGLang uses while it starts."""
