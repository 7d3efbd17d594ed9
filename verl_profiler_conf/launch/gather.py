"""Brings the captures of other nodes of a Ray cluster to the driver's folder, through the cluster's own connections.

An engine writes where it runs. Where the nodes share no folder, the driver asks each of them in one small Ray task what
this job has left there, and fetches what its own folder does not hold. Nothing here imports Ray: a job that has not
started Ray has no other nodes.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiler_conf.capture.files import MANIFEST_SUFFIX
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.sizes import size_text
from verl_profiler_conf.launch.bring import bring
from verl_profiler_conf.launch.on_node import Listing, RemoteCapture, digest, list_captures, read_chunk

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""How long a node waits for captures that its processes are still writing."""

ANSWER_S = 60.0
"""How long a node may take for one answer beyond that. The start of a worker process is part of the first."""


@dataclass(frozen=True)
class Node:
    """Another node of the cluster: Ray's id, the address that people know, and whether Ray takes it to be alive."""

    id: str
    address: str
    alive: bool


class Gatherer:
    """Gathers for one job, as often as it is asked to.

    Args:
        settings: the job's; `save_path` absolute.
    """

    def __init__(self, settings: Settings) -> None:
        self.unanswered: list[str] = []
        """One line for each node that did not answer in the last gathering."""
        self._settings = settings
        self._folder = Path(settings.save_path or "")
        self._alive_once: set[str] = set()
        """Ids of the nodes that this job has seen alive."""
        self._done: dict[tuple[str, str], str] = {}
        """Node and name of a manifest -> digest of what was brought. In this folder it may have another name."""
        self._brought_bytes = 0
        self._last_answer = 0.0
        self._lock = threading.Lock()

    def note_live_nodes(self) -> None:
        """Remember the nodes that are alive now: only the death of one of them concerns this job."""
        ray = running_ray()
        if ray is not None:
            self._alive_once |= {node.id for node in other_nodes(ray) if node.alive}

    def gather(self, *, patience: float = PATIENCE_S, captures_only: bool = False) -> None:
        """Bring what other nodes have, and log what came and what did not. Raises nothing, and never hangs.

        Args:
            patience: seconds that each node waits for captures that are still being written there.
            captures_only: bring no placeholder of a window that was not reached so far.
        """
        ray = running_ray()
        if ray is None or self._settings.gather == "never" or not self._lock.acquire(timeout=patience + ANSWER_S):
            return
        try:
            self._gather_within(ray, patience, captures_only)
        finally:
            self._lock.release()

    def _gather_within(self, ray: Any, patience: float, captures_only: bool) -> None:
        """Run `_gather`. Stop waiting when no answer comes for long: a cluster without its head may block for ever."""
        failure: list[Exception] = []

        def work() -> None:
            try:
                self._gather(ray, patience, captures_only)
            except Exception as error:
                failure.append(error)

        self._last_answer = time.monotonic()
        thread = threading.Thread(target=work, name="verl-profiler-gather", daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() - self._last_answer < patience + ANSWER_S:
            thread.join(0.1)
        if thread.is_alive():
            self.unanswered = [f"the Ray cluster did not answer within {patience + ANSWER_S:.0f} s"]
        elif failure:
            self.unanswered = [f"the Ray cluster could not be asked ({type(failure[0]).__name__}: {failure[0]})"]
            log.debug("where it comes from", exc_info=failure[0])

    def _gather(self, ray: Any, patience: float, captures_only: bool) -> None:
        others = other_nodes(ray)
        dead = [node for node in others if not node.alive and (not self._alive_once or node.id in self._alive_once)]
        self.unanswered = [f"node {node.address} is not alive any more" for node in dead]
        alive = [node for node in others if node.alive]
        if not alive:
            return
        known = self._known()
        asked = []
        for node in alive:
            has = {**known, **self._of(node)}
            listing = self._ask(
                ray, node, list_captures, str(self._folder), self._settings.run_id, has, patience, captures_only
            )
            asked.append((node, listing))
        brought: list[RemoteCapture] = []
        for node, answer in asked:
            try:
                found: Listing = ray.get(answer, timeout=patience + ANSWER_S)
                self._last_answer = time.monotonic()
                brought += self._bring_all(ray, node, found)
                if not captures_only:
                    self.unanswered += [f"node {node.address}: {name} was never finished" for name in found.unfinished]
            except Exception as error:  # of any kind that Ray has for a node that is gone, full or lacks this package
                self.unanswered.append(f"node {node.address} did not answer ({_one_line(error)})")
        if brought:
            size = size_text(sum(capture.size for capture in brought))
            log.info("brought %d captures (%s) from other nodes to %s", len(brought), size, self._folder)

    def _bring_all(self, ray: Any, node: Node, listing: Listing) -> list[RemoteCapture]:
        def read(name: str, offset: int, size: int) -> bytes:
            chunk = ray.get(self._ask(ray, node, read_chunk, str(self._folder), name, offset, size), timeout=ANSWER_S)
            self._last_answer = time.monotonic()
            return bytes(chunk)

        brought = []
        for capture in listing.captures:
            try:
                left = max(0, self._settings.gather_limit - self._brought_bytes)
                manifest = bring(
                    capture, self._folder, node=node.address, source=str(self._folder), read=read, limit=left
                )
            except (OSError, ValueError) as error:
                log.warning("%s was not brought from node %s: %s", capture.name, node.address, error)
                continue
            self._done[node.id, capture.name] = digest(capture.manifest)
            if manifest is None:
                continue
            if manifest.left_at is None:
                self._brought_bytes += capture.size
                brought.append(capture)
            else:
                log.warning("%s; it lies in %s", manifest.notes[-1], manifest.left_at)
        return brought

    def _ask(self, ray: Any, node: Node, function: Callable[..., Any], *arguments: Any) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(function)
        return task.options(scheduling_strategy=there, name=f"verl_profiler.{function.__name__}").remote(*arguments)

    def _known(self) -> dict[str, str]:
        """File name of a manifest in the driver's folder -> digest of its content."""
        return {path.name: digest(path.read_bytes()) for path in self._folder.glob(f"*{MANIFEST_SUFFIX}")}

    def _of(self, node: Node) -> Mapping[str, str]:
        return {name: known for (id_, name), known in self._done.items() if id_ == node.id}


def running_ray() -> Any:
    """Ray, where this process has started it; None otherwise."""
    ray: Any = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def other_nodes(ray: Any) -> list[Node]:
    """The nodes of the cluster except this process's own. Those that have died are among them."""
    own = ray.get_runtime_context().get_node_id()
    found = [Node(node["NodeID"], node["NodeManagerAddress"], bool(node["Alive"])) for node in ray.nodes()]
    return [node for node in found if node.id != own]


def _one_line(error: Exception) -> str:
    """Kind and cause; the text of a Ray task's error holds its whole traceback."""
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
