"""What was evaluated and what was written by reflection, on disk: a run that is killed pays for nothing twice.

Parts: `PromptAttempt` (one rollout under one candidate), `PromptJournal`. A line is written when a rollout ends, before
anybody acts on it. Attempts of one candidate on one row are separate draws: `take` hands out each once, and the
library's own state remembers how many it had taken (`counts`), so that a resumed run takes up exactly what the killed
one did not use. Invariants: one process writes; a broken last line is cut off; an attempt without a reward is never
handed out again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mettle.errors import StorageError, UserError

logger = logging.getLogger(__name__)

JOURNAL = "evaluations.jsonl"


@dataclass(frozen=True, slots=True)
class PromptAttempt:
    """One rollout. `reward` is None where it failed, with the reason in `error`; `record` is what reflection reads."""

    row: str
    candidate: str
    reward: float | None
    error: str | None = None
    record: dict[str, Any] = field(default_factory=dict)
    input_tokens: float = 0.0
    output_tokens: float = 0.0


def candidate_hash(candidate: Mapping[str, str]) -> str:
    """What tells candidates apart: their texts."""
    return hashlib.sha256(json.dumps(sorted(candidate.items())).encode()).hexdigest()[:16]


class PromptJournal:
    """The journal of one run directory; without a path it is kept in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: int | None = None
        self._attempts: dict[str, list[PromptAttempt]] = defaultdict(list)
        self._texts: dict[str, list[str]] = defaultdict(list)
        self.counts: dict[str, int] = {}
        self.num_errors = 0
        if path is not None:
            self._file = self._open(path)
            self._read(path)

    def take(self, candidate: str, row: str) -> PromptAttempt | None:
        """The next attempt that is there already; None when a rollout must be run."""
        found = self._next(_key(candidate, row), self._attempts)
        return found if isinstance(found, PromptAttempt) else None

    def add(self, attempt: PromptAttempt) -> None:
        """Write down a rollout that has just ended, as taken."""
        self._append({"attempt": asdict(attempt)})
        self._hold(attempt)
        if attempt.reward is not None:
            key = _key(attempt.candidate, attempt.row)
            self.counts[key] = self.counts.get(key, 0) + 1

    def take_text(self, prompt: str) -> str | None:
        """The next text that reflection wrote for this prompt; None when it must be asked."""
        found = self._next(_prompt_key(prompt), self._texts)
        return found if isinstance(found, str) else None

    def add_text(self, prompt: str, text: str) -> None:
        """Write down what reflection wrote, as taken."""
        key = _prompt_key(prompt)
        self._append({"reflection": key, "text": text})
        self._texts[key].append(text)
        self.counts[key] = self.counts.get(key, 0) + 1

    def has_reward(self, candidate: str, row: str) -> bool:
        """Whether some attempt of this candidate on this row came to a reward."""
        return bool(self._attempts.get(_key(candidate, row)))

    def tokens(self) -> tuple[float, float]:
        """Tokens read and written by all attempts with a reward."""
        attempts = [attempt for found in self._attempts.values() for attempt in found]
        return sum(a.input_tokens for a in attempts), sum(a.output_tokens for a in attempts)

    @property
    def num_attempts(self) -> int:
        """Rollouts that came to a reward."""
        return sum(map(len, self._attempts.values()))

    def close(self) -> None:
        """Let another process write."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _next(self, key: str, held: Mapping[str, list[Any]]) -> Any:
        taken = self.counts.get(key, 0)
        found = held.get(key, ())
        if taken >= len(found):
            return None
        self.counts[key] = taken + 1
        return found[taken]

    def _hold(self, attempt: PromptAttempt) -> None:
        if attempt.reward is None:
            self.num_errors += 1
        else:
            self._attempts[_key(attempt.candidate, attempt.row)].append(attempt)

    def _open(self, path: Path) -> int:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise UserError(f"{path.parent} is in use by another process; wait for it, or stop it") from error
        return file

    def _read(self, path: Path) -> None:
        end = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                try:
                    self._take_in(json.loads(line))
                except (ValueError, TypeError, KeyError):
                    logger.warning("skipped a line of %s that is no evaluation", path)
        assert self._file is not None, "only an open journal is read"
        os.ftruncate(self._file, end)

    def _take_in(self, line: dict[str, Any]) -> None:
        if "reflection" in line:
            self._texts[line["reflection"]].append(str(line["text"]))
        else:
            self._hold(PromptAttempt(**line["attempt"]))

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        view = memoryview((json.dumps(line, default=str) + "\n").encode())
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}; what is in it is safe") from error


def _key(candidate: str, row: str) -> str:
    return f"{candidate}/{row}"


def _prompt_key(prompt: str) -> str:
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]
