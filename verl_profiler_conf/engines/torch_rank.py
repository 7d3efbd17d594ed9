"""The rank of this process, for engines that have none of their own."""

from __future__ import annotations

import os
import sys


def torch_rank() -> int:
    """Rank in torch.distributed where it is initialised, else what a launcher put into the environment, else 0."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else 0
