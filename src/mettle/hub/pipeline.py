"""The processes of a run as a picture: who is up, who waits for whom, and what flows between them."""

from __future__ import annotations

from dataclasses import dataclass

from mettle.hub import filters
from mettle.hub.models import Process, RunSummary, ShownWait, Vital

MAIN = ("inference", "orchestrator", "trainer")

PURPOSES = {
    "inference": "serves the policy",
    "orchestrator": "rollouts and batches",
    "trainer": "batches to weights",
    "hub": "this page",
    "supervisor": "watches the others",
    "sft": "warms the policy up",
    "policy": "makes the policy",
}

TONES = {
    "running": "good", "done": "calm", "starting": "busy", "restarting": "busy", "stopping": "busy", "failed": "bad",
    "stopped": "calm",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """A process. `tone` colours its light; `state` is 'gone' when its pid no longer exists.

    A process that stands still has the word for that as its state: frozen, blocked, paused, stuck.
    """

    name: str
    purpose: str
    state: str
    tone: str
    pid: int | None
    restarts: int
    waits: tuple[ShownWait, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The three processes of the loop, the others, and the words on the links between them."""

    nodes: tuple[Node, ...]
    others: tuple[Node, ...]
    tokens: str
    batches: str
    weights: str
    is_moving: bool


def pipeline_of(summary: RunSummary, processes: list[Process], waits: list[ShownWait], vitals: list[Vital]) -> Pipeline:
    """The picture as it stands now."""
    known = {process.name: process for process in processes}
    faults = {vital.process: vital for vital in vitals if vital.fault}
    others = sorted({*known, *faults, "hub"} - set(MAIN))
    return Pipeline(
        nodes=tuple(_node(name, known.get(name), waits, summary, faults.get(name)) for name in MAIN),
        others=tuple(_node(name, known.get(name), waits, summary, faults.get(name)) for name in others),
        tokens=_tokens(summary),
        batches=f"batch {summary.shipped_step}" if summary.shipped_step else "no batch yet",
        weights=_weights(summary),
        is_moving=summary.state == "running" and summary.acked_version is not None,
    )


def _node(name: str, process: Process | None, waits: list[ShownWait], summary: RunSummary, fault: Vital | None) -> Node:
    mine = tuple(wait for wait in waits if summary.is_live and owner_process(wait.owner) == name)
    purpose = PURPOSES.get(name, "")
    if name == "hub":
        # Whoever reads this is being served, whatever became of a hub that the run once had.
        is_same = process is not None and process.is_alive
        return Node(name, purpose, "serving", "good", process.pid if process and is_same else None, 0, mine)
    if fault is not None:
        restarts = process.restarts if process is not None else 0
        return Node(name, purpose, str(fault.fault), "bad", fault.pid, restarts, mine)
    if process is None:
        return Node(name, purpose, "not started", "off", None, 0, mine)
    state = "gone" if process.is_alive is False else process.state
    tone = "bad" if state == "gone" else TONES.get(state, "calm")
    return Node(name, purpose, state, tone, process.pid, process.restarts, mine)


def owner_process(owner: str) -> str:
    """The process that a wait belongs to: `trainer`, `trainer/rank-0` and `trainer.loop` are the trainer's."""
    return owner.replace(".", "/").replace(":", "/").partition("/")[0]


def _tokens(summary: RunSummary) -> str:
    if summary.inference_tokens_per_s is None:
        return "no tokens yet"
    return f"{filters.compact(summary.inference_tokens_per_s)} tokens/s"


def _weights(summary: RunSummary) -> str:
    if summary.acked_version is None:
        return "no weights served yet"
    text = f"weights v{summary.acked_version} served"
    behind = (summary.version or 0) - summary.acked_version
    return f"{text}, v{summary.version} published" if behind > 0 else text
