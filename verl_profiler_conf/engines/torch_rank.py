"""Rank of this process in the job, for what has no ranks of its own (transformers, a decode loop, a job)."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection


def torch_rank() -> int:
    """Rank in torch.distributed where it is initialised, else what a launcher put into the environment, else 0."""
    return torch_place()[0]


def torch_place() -> tuple[int, int]:
    """The rank of `torch_rank`, and how many ranks there are."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    return _number("RANK", 0), _number("WORLD_SIZE", 1)


def is_reporting_rank(ranks: Collection[int], *, all_ranks: bool) -> bool:
    """Whether this process reports what became of the window.

    Under torchrun each rank is a job of its own, and only a rank that was asked to capture knows. Rank 0 reports where
    no such rank exists.
    """
    rank, world = torch_place()
    if all_ranks or rank in ranks:
        return True
    return rank == 0 and not any(wanted < world for wanted in ranks)


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else default
