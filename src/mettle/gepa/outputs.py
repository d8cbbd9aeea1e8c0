"""What a run leaves behind, in the published format, and what a resumed one reads.

    best_prompt.txt          the best system prompt so far
    pareto_frontier.jsonl    for each validation row, the best score and the prompts that reach it
    metadata.json            counts, figures, settings
    gepa_state.bin           the library's own state, a pickle (see `check_state`)
    run.db, rollouts/        every rollout and every reflection (see `journal`)
    evaluate.toml            an evaluation with the best prompt, where the environment takes one

Parts: `RunFolder`, `Search` (the library's state as plain figures). Invariants: files are replaced by rename; scores
that stand in for failed rollouts are not shown as scores; no state is unpickled that holds anything but plain data.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mettle.config import render_toml
from mettle.errors import StorageError, UserError
from mettle.gepa.config import GepaSpec
from mettle.gepa.rows import SYSTEM_PROMPT

STATE, SETTINGS, METADATA = "gepa_state.bin", "run.json", "metadata.json"
BEST_PROMPT, FRONTIER, EVALUATE = "best_prompt.txt", "pareto_frontier.jsonl", "evaluate.toml"


@dataclass(frozen=True, slots=True)
class Search:
    """Where a search stands. `scores[i]` maps a validation row to what candidate i got there."""

    candidates: list[dict[str, str]]
    scores: list[dict[int, float]]
    num_calls: int
    num_iterations: int

    @property
    def averages(self) -> list[float]:
        """Mean score of each candidate."""
        return [sum(found.values()) / len(found) if found else float("-inf") for found in self.scores]

    @property
    def best(self) -> int:
        """The candidate with the highest mean, the oldest of equals."""
        averages = self.averages
        return max(range(len(averages)), key=lambda index: averages[index])

    def frontier(self, is_scored: Callable[[dict[str, str], int], bool]) -> list[dict[str, Any]]:
        """The published lines: each validation row with the prompts that do best on it."""
        lines: list[dict[str, Any]] = []
        for row in sorted(self.scores[0]):
            found = [
                (index, scores[row])
                for index, scores in enumerate(self.scores)
                if row in scores and is_scored(self.candidates[index], row)
            ]
            top = max((score for _, score in found), default=None)
            best = [self._line(index, score) for index, score in found if score == top]
            lines.append({"valset_row": row, "best_score": top, "num_best_prompts": len(best), "best_prompts": best})
        return lines

    def _line(self, index: int, score: float) -> dict[str, Any]:
        candidate = self.candidates[index]
        line = {"candidate_idx": index, "system_prompt": candidate[SYSTEM_PROMPT], "score": score}
        others = {name: text for name, text in candidate.items() if name != SYSTEM_PROMPT}
        return {**line, "components": others} if others else line


class RunFolder:
    """The directory of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_settings(self) -> dict[str, Any]:
        """What the run was told. Raises: UserError when there is no run here."""
        try:
            settings = json.loads((self.path / SETTINGS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            settings = None
        if not isinstance(settings, dict):
            raise UserError(f"no prompt optimisation in {self.path}: it has no {SETTINGS} that can be read")
        return settings

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Keep what the run is told."""
        self.write(SETTINGS, json.dumps(settings, indent=2) + "\n")

    def write(self, name: str, text: str) -> None:
        """Replace one file."""
        temporary = self.path / f".{name}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8", errors="surrogatepass")
            temporary.replace(self.path / name)
        except OSError as error:
            raise StorageError(f"cannot write {self.path / name}: {error.strerror}") from error

    def search(self) -> Search | None:
        """The state that the library saved last; None before it saved any."""
        data = self.check_state()
        if data is None:
            return None
        return Search(
            [dict(candidate) for candidate in data["program_candidates"]],
            [dict(scores) for scores in data["prog_candidate_val_subscores"]],
            int(data["total_num_evals"]),
            int(data["i"]) + 1,
        )

    def check_state(self) -> dict[str, Any] | None:
        """Read the library's state; None when there is none.

        A pickle can run code when it is read, so this one is read without any: ours holds dicts, lists, sets, texts and
        numbers, for which a pickle names no class. Raises: UserError when it names one, or is no such state.
        """
        try:
            with (self.path / STATE).open("rb") as file:
                data = _PlainUnpickler(file).load()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"cannot read {self.path / STATE}: {error.strerror}") from error
        except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.path / STATE} is not a state that this program wrote ({error}); it was not loaded"
            ) from None
        if not isinstance(data, dict) or not {"program_candidates", "total_num_evals", "i"} <= set(data):
            raise UserError(f"{self.path / STATE} is not a state that this program wrote; it was not used")
        return data


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain data; whatever would import or call something is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def evaluation_toml(spec: GepaSpec, prompt: str) -> str:
    """An evaluation of the environment with `prompt`, as `mettle eval run` reads it."""
    shared = {name: getattr(spec, name) for name in _SHARED}
    text = prompt.encode("utf-8", "replace").decode()  # A lone surrogate has no place in a file of TOML.
    own = {name: getattr(spec, name) for name in ("env_id", "env_args", "sampling_args")}
    own["extra_env_kwargs"] = {**spec.extra_env_kwargs, "system_prompt": text}
    said = {name: value for name, value in shared.items() if value is not None}
    return render_toml({**said, "eval": [{name: value for name, value in own.items() if value}]})


_SHARED = (
    "model", "provider", "api_base_url", "api_key_var", "api_client_type", "endpoints_path", "env_dir_path",
)  # fmt: skip
