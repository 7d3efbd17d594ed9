"""Names as small numbers, and the kind of device work that a name stands for."""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["compute", "communication", "copy"]

KINDS: tuple[Kind, ...] = ("compute", "communication", "copy")

OTHER = "(other names)"
"""Stands for all names beyond what a table keeps."""

_MAX_NAMES = 100_000
_MAX_CHARS = 1 << 24

_COMMUNICATION = re.compile(
    r"nccl|rccl|hccl|oneccl|^hcom_|^mscclpp|cross_device_reduce|multimem_|one_shot_all|two_shot_all|nvshmem"
    r"|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|deep_ep::",
    re.IGNORECASE,
)
_COPY = re.compile(r"^(Memcpy|Memset|dma|Copy(Host|Device)To(Host|Device)|MEMCPY|SDMA|PCIE_DMA)")


class Names:
    """Numbers names as they come. Beyond a limit, all further names share one number.

    Attributes:
        texts: the names, each at the place that is its number.
        numbers: the other way round.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.numbers: dict[str, int] = {}
        self._chars = 0

    def number(self, name: str) -> int:
        """The number of `name`."""
        number = self.numbers.get(name)
        return self._new(name) if number is None else number

    def _new(self, name: str) -> int:
        if len(self.texts) >= _MAX_NAMES or self._chars + len(name) > _MAX_CHARS:
            if OTHER in self.numbers:
                return self.numbers[OTHER]
            name = OTHER
        number = len(self.texts)
        self.numbers[name] = number
        self.texts.append(name)
        self._chars += len(name)
        return number


def kind_of(name: str) -> Kind:
    """What device work of this name does: NCCL and its like communicate, copies move data, the rest computes."""
    if _COPY.match(name):
        return "copy"
    return "communication" if _COMMUNICATION.search(name) else "compute"
