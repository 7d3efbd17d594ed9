"""What verl's weight updates need of vLLM's CPU build, which vLLM loads through its own plugins. For tests only."""

from __future__ import annotations

import os
from typing import Any


def keep_linear_weights() -> None:
    """The CPU build repacks the weights of linear layers and drops the originals, which an update is copied into."""
    if os.environ.get("VERL_PLATFORM") != "cpu":
        return
    import torch
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
