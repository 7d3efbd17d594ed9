"""Where in a job with several engines a capture was made, and at which step of the job.

A framework that runs several engines ("replicas") says so in two ways. `PLACE_NAME` in the environment of an engine's
processes tells which replica they are; the label of an arming tells the step.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

PLACE_NAME = "VERL_PROFILER_CONF_PLACE"
"""Environment variable that carries a `Place` to the processes of one engine, as one JSON object."""

_LABEL = re.compile(r"step(\d+)_replica(\d+)")


@dataclass(frozen=True)
class Place:
    """One engine among the engines of a job.

    Attributes:
        replica: index of the engine, 0-based.
        first_rank: global rank of the engine's rank 0; the ranks of all engines are counted through.
        node: address of the machine, as the cluster knows it; None: unknown.
    """

    replica: int
    first_rank: int = 0
    node: str | None = None

    def to_json(self) -> str:
        """One JSON object; `from_json` gives an equal value back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None) -> Place | None:
        """Read what `to_json` wrote; None for anything else, which then says nothing of a place."""
        try:
            raw = json.loads(text or "")
            place = cls(**raw)
        except (ValueError, TypeError, RecursionError):
            return None
        numbers = isinstance(place.replica, int) and isinstance(place.first_rank, int)
        return place if numbers and isinstance(place.node, str | None) else None


def label_of(step: int, replica: int) -> str:
    """`step3_replica0`: the label under which a replica is armed for a step."""
    return f"step{step}_replica{replica}"


def step_of(label: str | None) -> int | None:
    """The step that a label of `label_of` names; None for any other label."""
    match = _LABEL.fullmatch(label or "")
    return int(match[1]) if match else None
