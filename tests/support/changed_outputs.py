"""What a scheduler tells a worker, as a release that nobody knows yet might say it: names gone, other forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GONE = object()


class Changed:
    """Another object, but for some of its attributes."""

    def __init__(self, original: Any, **changes: Any) -> None:
        self.__dict__.update(_original=original, _changes=changes)

    def __getattr__(self, name: str) -> Any:
        changes = self.__dict__["_changes"]
        if name not in changes:
            return getattr(self.__dict__["_original"], name)
        if changes[name] is GONE:
            raise AttributeError(f"no attribute {name!r}")
        return changes[name]


Change = Callable[[Any], Any]


def _part(name: str, **changes: Any) -> Change:
    return lambda output: Changed(output, **{name: Changed(getattr(output, name), **changes)})


def _first(name: str, **changes: Any) -> Change:
    return lambda output: Changed(output, **{name: [Changed(part, **changes) for part in getattr(output, name)]})


def _whole(**changes: Any) -> Change:
    return lambda output: Changed(output, **changes)


def _as_pairs(output: Any) -> Any:
    return Changed(output, num_scheduled_tokens=list(output.num_scheduled_tokens.items()))


VLLM_ATTRIBUTES = (
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
    "finished_req_ids",
)

VLLM: dict[str, Change] = {
    **{f"no {name}": _whole(**{name: GONE}) for name in VLLM_ATTRIBUTES},
    **{f"{name} is null": _whole(**{name: None}) for name in VLLM_ATTRIBUTES},
    "new requests are elsewhere": _whole(scheduled_new_reqs=[], num_scheduled_tokens={}),
    "counts are pairs": _as_pairs,
    "no total": _whole(total_num_scheduled_tokens=0),
    "new requests are counted": _whole(scheduled_new_reqs=1),
    "cached requests are a list": _whole(scheduled_cached_reqs=[]),
    "cached requests without ids": _part("scheduled_cached_reqs", req_ids=GONE),
    "cached requests without counts": _part("scheduled_cached_reqs", num_computed_tokens=GONE),
    "cached requests with one count": _part("scheduled_cached_reqs", num_computed_tokens=[1, 2, 3, 4]),
    "requests without an id": _first("scheduled_new_reqs", req_id=GONE),
    "requests whose id is a number": _first("scheduled_new_reqs", req_id=7),
    "requests without a prompt": _first("scheduled_new_reqs", prompt_token_ids=GONE),
    "requests without counts": _first("scheduled_new_reqs", num_computed_tokens=GONE),
    "requests without parameters": _first("scheduled_new_reqs", sampling_params=GONE),
}
"""What has changed -> a SchedulerOutput so."""

SGLANG: dict[str, Change] = {
    **{f"no {name}": _whole(**{name: GONE}) for name in ("reqs", "forward_mode", "seq_lens_cpu", "decoding_reqs")},
    "no encoder lengths": _whole(encoder_lens_cpu=GONE),
    "reqs is null": _whole(reqs=None),
    "reqs are counted": _whole(reqs=1),
    "reqs by id": lambda batch: Changed(batch, reqs={req.rid: req for req in batch.reqs}),
    "the mode is a text": _whole(forward_mode="decode"),
    "modes without decode": _part("forward_mode", is_decode=GONE),
    "modes that are flags": _part("forward_mode", is_decode=True),
    "requests without an id": _first("reqs", rid=GONE),
    "requests whose id is a number": _first("reqs", rid=7),
    "requests without a prompt": _first("reqs", origin_input_ids=GONE),
    "requests without tokens": _first("reqs", output_ids=GONE),
    "requests whose tokens are counted": _first("reqs", output_ids=3),
    "requests without parameters": _first("reqs", sampling_params=GONE),
    "requests that do not end": _first("reqs", finished_reason=GONE),
    "requests without a final count": _first("reqs", finished_len=GONE),
}
"""What has changed -> a ScheduleBatch so."""
