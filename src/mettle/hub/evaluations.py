"""Evaluations on the pages: those that were run by themselves, and those inside a run.

Parts: `EvaluationCatalog` (which there are), `OpenEvaluation` (one of them: its reader and its statistics, kept until
something is added), `EvaluationFilter` (which of its rollouts are shown), `find_rollouts`, `open_rollout`.
Invariants: figures are those of `mettle.evals`, as everywhere; a name from outside is only ever compared with the names
that are there, never joined to a path; one thread at a time is inside an open evaluation.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mettle.errors import UserError
from mettle.evals.entries import OWN_KIND, EvaluationEntry, entries_or_problem, find_evaluations
from mettle.evals.facts import RolloutFacts
from mettle.evals.reader import EvaluationReader
from mettle.evals.report import plain
from mettle.evals.results import METADATA, RESULTS
from mettle.hub.models import (
    EvaluationCard,
    EvaluationRollout,
    EvaluationRollouts,
    RolloutDetail,
    ShownRollout,
    Sibling,
)
from mettle.hub.reader import written_ns
from mettle.hub.rollouts import detail_of
from mettle.hub.vocabulary import load_vocabulary
from mettle.records.tasks import RolloutRecord
from mettle.storage.evals import RUNNING
from mettle.storage.run_dir import RunDir
from mettle.wording import bins

MAX_OPEN = 8
MAX_SEARCHES = 16
PAGE_SIZE = 50
NUM_BINS = 20
PROBE = "probe"
"""A measure that the warm-up takes of itself."""
QUIET_S = 30.0
"""An evaluation that says it runs, but has written nothing for this long, counts as interrupted."""

EvaluationOrder = Literal["ended", "newest", "reward", "-reward", "tokens", "duration", "task"]


@dataclass(frozen=True, slots=True)
class EvaluationFilter:
    """Which rollouts of an evaluation to show. What is None or empty leaves a condition out."""

    words: str = ""
    task: str = ""
    cause: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    is_error: bool = False
    is_truncated: bool = False
    sort: EvaluationOrder = "ended"

    def holds(self, facts: RolloutFacts) -> bool:
        """Whether a rollout is shown, its words aside."""
        is_low = self.min_reward is not None and (facts.reward is None or facts.reward < self.min_reward)
        is_high = self.max_reward is not None and (facts.reward is None or facts.reward > self.max_reward)
        return not (
            is_low
            or is_high
            or (self.task and str(facts.example_id) != self.task)
            or (self.cause and facts.cause != self.cause)
            or (self.is_error and facts.cause is None)
            or (self.is_truncated and not facts.is_truncated)
        )


ORDERS: dict[EvaluationOrder, Callable[[tuple[int, RolloutFacts]], Any]] = {
    "ended": lambda each: each[0],
    "newest": lambda each: -each[0],
    "reward": lambda each: (each[1].reward is None, each[1].reward or 0.0, each[0]),
    "-reward": lambda each: (each[1].reward is None, -(each[1].reward or 0.0), each[0]),
    "tokens": lambda each: (-(each[1].output_tokens or 0.0), each[0]),
    "duration": lambda each: (-(each[1].total_s or 0.0), each[0]),
    "task": lambda each: (isinstance(each[1].example_id, str), each[1].example_id or 0, each[0]),
}


class OpenEvaluation:
    """One evaluation open for reading. Raises: UserError, StorageError when it cannot be read."""

    def __init__(self, path: Path, eval_id: int | None) -> None:
        self.lock = threading.RLock()
        self.reader = EvaluationReader(path, eval_id)
        self.stats: Mapping[str, Any] = plain(self.reader.stats())
        self.entry = self.reader.entry
        self._found: OrderedDict[str, list[int]] = OrderedDict()

    def refresh(self) -> None:
        """Take in what was added."""
        with self.lock:
            before = len(self.reader)
            grown = self.reader.refresh()
            self.entry = self.reader.entry
            self.reader.metadata = self.entry.metadata or self.reader.metadata
            if grown or len(self.reader) != before:
                self.stats = plain(self.reader.stats())
                self._found.clear()

    def holding(self, words: str) -> list[int]:
        """The rollouts whose conversation, answer or error holds all of the words."""
        with self.lock:
            if words not in self._found:
                wanted = words.split()
                found = list(self.reader.search(wanted[0]))
                for word in wanted[1:]:
                    also = set(self.reader.search(word))
                    found = [index for index in found if index in also]
                self._found[words] = found
                while len(self._found) > MAX_SEARCHES:
                    self._found.popitem(last=False)
            return self._found[words]

    def histogram(self) -> tuple[float, float, list[int]] | None:
        """The range of the rewards, and how many are in each part of it."""
        rewards = [facts.reward for facts in self.reader.facts if facts.reward is not None]
        return bins(rewards, NUM_BINS) if rewards else None


class EvaluationCatalog:
    """The evaluations under a workspace, beside the runs of a folder."""

    def __init__(
        self, root: Path | None, runs: Callable[[], Mapping[Path, bool]], *, runs_root: Path | None = None
    ) -> None:
        """`runs` has the run directories of `runs_root`, and whether each is an evaluation by itself (`is_own`)."""
        self._runs_root = runs_root
        self._root = None if root is None else root.resolve()
        self._runs = runs
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[Path, int | None], OpenEvaluation] = OrderedDict()
        self._entries: dict[Path, tuple[tuple[int, ...], list[EvaluationEntry]]] = {}

    def own(self) -> dict[str, EvaluationEntry]:
        """The evaluations that were run by themselves, by the name they have in addresses, newest first."""
        found: dict[str, EvaluationEntry] = {}
        times: dict[str, int] = {}
        for folder in self._own_folders():
            name = f"{folder.parent.name}~{folder.name}"
            for entry in self.entries(folder):
                if entry.eval_id is None or entry.kind == OWN_KIND:
                    times[name] = times.get(name, 0) + 1
                    found[name if times[name] == 1 else f"{name}~{times[name]}"] = entry
        return dict(sorted(found.items(), key=lambda item: (is_live(item[1]), item[1].modified_at), reverse=True))

    def on(self, environment: str) -> list[tuple[str, EvaluationEntry]]:
        """The evaluations of this machine on an environment, by name: those run by themselves, and of each run that
        trains its first and its last. `owner/name` is also what is known here by its name alone.
        """
        found = [(name, entry) for name, entry in self.own().items() if is_of(entry, environment)]
        for folder, is_own in self._runs().items():
            if is_own:
                continue
            inside = [
                entry
                for entry in self.entries(folder)
                if entry.eval_id is not None and entry.kind != PROBE and is_of(entry, environment)
            ]
            ends = [inside[0], inside[-1]] if len(inside) > 1 else inside
            found += [(f"runs/{folder.name}/evals/{entry.eval_id}", entry) for entry in ends]
        return found

    def is_own(self, folder: Path) -> bool:
        """True for the folder of an evaluation without a trainer, in a folder of runs."""
        if any((folder / name).exists() for name in ("run.toml", "endpoints")):
            return False
        entries = self.entries(folder)
        return bool(entries) and all(entry.kind == OWN_KIND and entry.problem is None for entry in entries)

    def entries(self, folder: Path) -> list[EvaluationEntry]:
        """The evaluations of a folder as a list shows them, read anew when its files have changed."""
        stamp = tuple(written_ns(f"{folder}/{name}") for name in ("run.db", "run.db-wal", METADATA, RESULTS))
        kept = self._entries.get(folder)
        if kept is None or kept[0] != stamp:
            kept = stamp, entries_or_problem(folder)
            self._entries[folder] = kept
        return kept[1]

    def open(self, name: str) -> OpenEvaluation:
        """An evaluation by the name it has in addresses. Raises: UserError when there is none."""
        entry = self.own().get(name)
        if entry is None:
            raise UserError(f"There is no evaluation named {name!r} here.")
        return self.open_at(entry.path, entry.eval_id)

    def open_at(self, folder: Path, eval_id: int | None) -> OpenEvaluation:
        """One evaluation of a folder. Raises: UserError when there is none."""
        if eval_id is not None and all(entry.eval_id != eval_id for entry in self.entries(folder)):
            raise UserError(f"The run {folder.name} has no evaluation {eval_id}.")
        with self._lock:
            found = self._open.pop((folder, eval_id), None) or OpenEvaluation(folder, eval_id)
            self._open[folder, eval_id] = found
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        found.refresh()
        return found

    def _own_folders(self) -> list[Path]:
        runs = self._runs()
        under = [] if self._root is None else find_evaluations(self._root, passing_over=self._runs_root)
        return [path for path in under if path not in runs] + [path for path, is_own in runs.items() if is_own]


def is_of(entry: EvaluationEntry, environment: str) -> bool:
    """True when an evaluation is on an environment, as far as names say: its version aside, and its owner where only
    one of the two has one."""
    own, wanted = (name.partition("@")[0].replace("_", "-").lower() for name in (entry.env_id, environment))
    is_partial = ("/" in own) != ("/" in wanted)
    return own == wanted or (is_partial and own.rpartition("/")[2] == wanted.rpartition("/")[2])


def is_live(entry: EvaluationEntry) -> bool:
    """True while rollouts come in."""
    return state_of(entry) == RUNNING


def state_of(entry: EvaluationEntry, now: float | None = None) -> str:
    """running, finished, interrupted or unreadable; a published one without its end is interrupted."""
    if entry.problem is not None:
        return "unreadable"
    is_published_live = entry.eval_id is None and "stats" not in entry.metadata and "launch" in entry.metadata
    if entry.state == RUNNING or is_published_live:
        written = max(written_ns(f"{entry.path}/{name}") for name in ("run.db", "run.db-wal", RESULTS)) / 1e9
        return "interrupted" if (time.time() if now is None else now) - written > QUIET_S else RUNNING
    return "finished" if entry.is_complete else entry.state


def card_of(name: str, entry: EvaluationEntry) -> EvaluationCard:
    """The line of an evaluation in a list."""
    low, high = entry.interval or (None, None)
    return EvaluationCard(
        name=name, kind=entry.kind, step=entry.step, eval_id=entry.eval_id, env_id=entry.env_id, model=entry.model,
        state=state_of(entry), mean=entry.reward, ci_low=low, ci_high=high, error_rate=entry.error_rate,
        num_rollouts=entry.num_done, planned_rollouts=entry.num_planned, cost_usd=entry.cost_usd,
        duration_s=entry.time_s, written_at=entry.modified_at, problem=entry.problem,
    )  # fmt: skip


def find_rollouts(
    found: OpenEvaluation, chosen: EvaluationFilter, page: int, page_size: int = PAGE_SIZE
) -> EvaluationRollouts:
    """One page; a page past the end is the last one."""
    with found.lock:
        facts = found.reader.facts
        places = found.holding(chosen.words) if chosen.words.strip() else range(len(facts))
        kept = [(index, facts[index]) for index in places if chosen.holds(facts[index])]
    kept.sort(key=ORDERS[chosen.sort])
    num_pages = max(1, -(-len(kept) // page_size))
    page = min(max(1, page), num_pages)
    shown = kept[(page - 1) * page_size : page * page_size]
    return EvaluationRollouts(
        rollouts=[_rollout(index, each) for index, each in shown], total=len(kept), page=page, num_pages=num_pages
    )


def _rollout(index: int, facts: RolloutFacts) -> EvaluationRollout:
    return EvaluationRollout(
        index=index, example_id=str(facts.example_id), reward=facts.reward, metrics=facts.metrics,
        error_kind=facts.cause, error=facts.error_message, stop_condition=facts.stop_condition,
        is_truncated=facts.is_truncated, num_turns=facts.num_turns, input_tokens=facts.input_tokens,
        output_tokens=facts.output_tokens, duration_s=facts.total_s, excerpt=facts.excerpt,
    )  # fmt: skip


def open_rollout(found: OpenEvaluation, index: int) -> tuple[RolloutDetail, list[int]]:
    """A rollout with its messages, and the numbers of all rollouts of its task.

    Raises: UserError when it is not there, StorageError when it cannot be read.
    """
    with found.lock:
        record = found.reader.record(index)
        facts = found.reader.facts
        members = [place for place, each in enumerate(facts) if each.example_id == facts[index].example_id]
        siblings = [_sibling(place, facts[member], str(member)) for place, member in enumerate(members)]
    row = _row_of(found.entry, record, index, members.index(index))
    return detail_of(record, row, siblings, load_vocabulary(RunDir(found.reader.path).model)), members


def _sibling(position: int, facts: RolloutFacts, name: str) -> Sibling:
    return Sibling(
        rollout_id=name, position=position, reward=facts.reward, advantage=None,
        num_tokens=int(facts.output_tokens or 0), error_kind=facts.cause,
    )  # fmt: skip


def _row_of(entry: EvaluationEntry, record: RolloutRecord, index: int, position: int) -> ShownRollout:
    oldest, newest = record.version_range
    return ShownRollout(
        rollout_id=str(index), kind="eval", env_id=entry.env_id, draw_id=None, uid=f"task {record.example_id}",
        eval_id=entry.eval_id, step=None, position=position, reward=record.reward, advantage=record.advantage,
        metrics=record.metrics, num_turns=record.num_turns, num_tokens=record.num_output_tokens, version_min=oldest,
        version_max=newest, stop_condition=record.stop_condition, is_truncated=record.is_truncated,
        error_kind=record.error_kind, error=record.error, duration_s=record.duration_s, created_at=entry.modified_at,
    )  # fmt: skip
