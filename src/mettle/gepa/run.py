"""One optimisation from its settings to its files.

Parts: `prepare` (everything that can be wrong shows here, before the first rollout), `Optimisation.run` (measure,
search, measure again, write), `SearchOutcome`. Invariants: whatever ends a run, the best prompt so far is on disk and
the run can be resumed; the search is the library's, with nothing of it replaced but the random draws, which are ours
to save.
"""

from __future__ import annotations

import json
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mettle.clients.factory import client_from
from mettle.clients.prices import Price
from mettle.config import Loaded
from mettle.config.layers import tree_layer
from mettle.config.loader import NOTHING_GIVEN
from mettle.config.options import Given
from mettle.envs.prepared import Prepared
from mettle.envs.prepared import prepare as prepare_evaluation
from mettle.errors import ServiceError, UserError
from mettle.evals.spec import unsaved_evaluation
from mettle.evals.targets import Served, find_target
from mettle.gepa.adapter import EnvironmentAdapter
from mettle.gepa.config import GepaSpec, load_spec, read_file
from mettle.gepa.feedback import attempt_of
from mettle.gepa.guard import Guard
from mettle.gepa.held_out import HeldOutComparison, compare, measure
from mettle.gepa.journal import PromptAttempt, PromptJournal, candidate_hash
from mettle.gepa.outputs import (
    BEST_PROMPT,
    EVALUATE,
    FRONTIER,
    METADATA,
    SETTINGS,
    RunFolder,
    Search,
    evaluation_toml,
)
from mettle.gepa.progress import SearchProgress, Watch
from mettle.gepa.reflection import ReflectionModel
from mettle.gepa.rollouts import Rollouts, SearchLoop
from mettle.gepa.rows import SYSTEM_PROMPT, TOOL_PREFIX, RowSplit, prompt_of_rows, split_rows
from mettle.processes.clock import steady_time

logger = logging.getLogger(__name__)

MAY_CHANGE = (
    "max_calls", "max_concurrent", "max_retries", "api_base_url", "api_key_var", "provider", "endpoints_path",
    "headers", "run_dir", "save_results", "timeout",
)  # fmt: skip
"""Settings that a resumed run may be given anew; another value of any other would make it another search."""


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """How a run ended. `comparison` is None without held-out rows; `path` is None when nothing was saved."""

    path: Path | None
    search: Search
    start_prompt: str
    best: dict[str, str]
    comparison: HeldOutComparison | None
    num_errors: int
    num_reflections: int
    cost_usd: float | None
    time_s: float
    evaluate: Path | None

    @property
    def best_prompt(self) -> str:
        """The system prompt of the best candidate."""
        return self.best[SYSTEM_PROMPT]


def check_library() -> None:
    """Raises: UserError when the `gepa` library is not installed."""
    try:
        import gepa  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "gepa":
            raise
        raise UserError("prompt optimisation needs the gepa library; pip install 'mettle-lab[gepa]'") from None


def resumed(path: Path, files: Sequence[Path] = (), given: Given = NOTHING_GIVEN) -> Loaded[GepaSpec]:
    """The settings of the run in `path`, with what may change taken from `files` and from what was `given`.

    Raises: UserError when there is no run, or when they would make it another one.
    """
    saved = tree_layer(RunFolder(path).read_settings(), str(path / SETTINGS))
    before = load_spec([saved]).config
    loaded = load_spec([saved, *map(read_file, files)], given, files)
    for name in GepaSpec.model_fields:
        old, new = getattr(before, name), getattr(loaded.config, name)
        if name not in MAY_CHANGE and new != old:
            raise UserError(
                f"cannot resume {path} with another {name}: it has {old!r}, not {new!r}; "
                "leave it out, or start a new run"
            )
    return Loaded(loaded.config.model_copy(update={"run_dir": str(path)}), {**loaded.sources, "run_dir": "--resume"})


def prepare(spec: GepaSpec, serve: Callable[[Path], Served]) -> Optimisation:
    """Find the environment, its rows and both models. `serve` makes a model directory answer.

    Raises: UserError for whatever is not there or does not fit.
    """
    check_library()
    if spec.save_results and spec.run_dir is not None:
        RunFolder(Path(spec.run_dir)).check_state()
    prepared = prepare_evaluation(unsaved_evaluation(spec), serve)
    split = split_rows(prepared.env, spec.num_train, spec.num_val, spec.num_test, spec.seed)
    if len(split.train) < spec.minibatch_size:
        spec = spec.model_copy(update={"minibatch_size": len(split.train)})
    least = len(split.val) + 2 * spec.minibatch_size
    if spec.max_calls < least:
        raise UserError(
            f"{spec.max_calls} calls pay for no round: {len(split.val)} validation rows and two minibatches of "
            f"{spec.minibatch_size} are {least}; raise --max-calls or lower --num-val"
        )
    start = spec.seed_prompt
    if start is None:
        start = prompt_of_rows([*split.train, *split.val, *split.test])
    reflection = _reflection_target(spec, serve)
    path = _path(spec, prepared) if spec.save_results else None
    return Optimisation(spec, prepared, split, start, reflection, path)


@dataclass(slots=True)
class Optimisation:
    """A run that is ready. `path` is None when nothing is to be saved."""

    spec: GepaSpec
    prepared: Prepared
    split: RowSplit
    start_prompt: str
    reflection: Any
    path: Path | None

    def run(self, show: Callable[[SearchProgress], None], say: Callable[[str], None]) -> SearchOutcome:
        """Measure, search, measure again. Ctrl-C leaves the best so far in the run's folder and rises.

        Raises: UserError, ServiceError or StorageError for what ends a search; the run can be resumed.
        """
        with ExitStack() as stack:
            path = self.path or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mettle-gepa-")))
            return _Run(self, path, stack, show, say).go()

    @property
    def start(self) -> dict[str, str]:
        """The candidate that the search begins with."""
        texts = {SYSTEM_PROMPT: self.start_prompt}
        if self.spec.tool_descriptions:
            tools = self.prepared.env.tool_defs
            if not tools:
                raise UserError(f"{self.spec.env_id} has no tools whose descriptions could be optimised")
            texts |= {f"{TOOL_PREFIX}{tool['name']}": tool["description"] or "" for tool in tools}
        return texts


class _Run:
    """The parts of one run while it runs."""

    def __init__(
        self,
        plan: Optimisation,
        path: Path,
        stack: ExitStack,
        show: Callable[[SearchProgress], None],
        say: Callable[[str], None],
    ) -> None:
        self.plan, self.folder, self.started = plan, RunFolder(path), steady_time()
        spec, prepared = plan.spec, plan.prepared
        self.start = plan.start
        self.journal = PromptJournal(
            path, spec.env_id, prepared.target.model,
            partial(attempt_of, state_columns=spec.state_columns, perfect_score=spec.perfect_score),
        )  # fmt: skip
        stack.callback(self.journal.close)
        self.folder.write_settings(spec.to_dict() | {"run_dir": str(path)})
        if not (path / BEST_PROMPT).exists():
            self._keep_best(self.start)  # Until something is better, the best is what we began with.
        self.guard = Guard()
        self.watch = Watch(spec.max_calls, show, say, self._keep_best)
        self.loop = stack.enter_context(SearchLoop())
        self.rollouts = Rollouts(
            prepared.env, prepared.client, prepared.target.model, spec.sampling_args, self.journal,
            max_concurrent=spec.max_concurrent, max_retries=spec.max_retries,
            state_columns=spec.state_columns, on_attempt=self.watch.attempt,
        )  # fmt: skip
        stack.callback(lambda: self.loop.run(self.rollouts.close()))
        client = client_from(plan.reflection.client)
        stack.callback(lambda: self.loop.run(client.close()))
        self.reflect = ReflectionModel(self.loop, client, plan.reflection.model, self.journal, self.guard)

    def go(self) -> SearchOutcome:
        """All of it."""
        before = self._measure("before", self.start)
        try:
            self._search()
        except KeyboardInterrupt:
            self._write(self.folder.search(), None)
            raise
        search = self.folder.search()
        if search is None:
            raise self.guard.fatal or ServiceError("the search ended before it had a state")
        self._write(search, None)
        if self.guard.fatal is not None:
            raise self.guard.fatal
        best = search.candidates[search.best]
        comparison = None
        if before:
            after = before if best == self.start else self._measure("after", best)
            comparison = compare(before, after)
        self.journal.is_finished = True
        return self._write(search, comparison)

    def _measure(self, stage: str, candidate: Mapping[str, str]) -> dict[int, list[PromptAttempt]]:
        if not self.plan.split.test:
            return {}
        self.watch.stage(stage)
        spec = self.plan.spec
        found = self.loop.run(measure(self.rollouts, self.plan.split.test, candidate, spec.test_rollouts))
        attempts = [attempt for row in found.values() for attempt in row]
        if all(attempt.reward is None for attempt in attempts):
            raise ServiceError(
                f"no held-out rollout of {len(attempts)} has a reward; the first failed with {attempts[0].error}"
            )
        return found

    def _search(self) -> None:
        from gepa.strategies.batch_sampler import EpochShuffledBatchSampler
        from gepa.strategies.candidate_selector import ParetoCandidateSelector

        import gepa

        self.watch.stage("search")
        spec, split = self.plan.spec, self.plan.split
        rng = random.Random(spec.seed)
        sampler = EpochShuffledBatchSampler(minibatch_size=spec.minibatch_size, rng=rng)
        gepa.optimize(
            seed_candidate=dict(self.start),
            trainset=[(f"train:{index}", row) for index, row in enumerate(split.train)],
            valset=[(f"val:{index}", row) for index, row in enumerate(split.val)],
            adapter=EnvironmentAdapter(self.loop, self.rollouts, self.journal, self.guard, rng, sampler),
            reflection_lm=self.reflect,
            candidate_selection_strategy=ParetoCandidateSelector(rng=rng),
            batch_sampler=sampler,
            perfect_score=spec.perfect_score,
            max_metric_calls=spec.max_calls,
            stop_callbacks=self.guard,
            logger=_LibraryLog(),
            run_dir=str(self.folder.path),
            callbacks=[self.watch],
            track_best_outputs=False,
            raise_on_exception=False,
            seed=spec.seed,
        )

    def _keep_best(self, candidate: Mapping[str, str]) -> None:
        self.folder.write(BEST_PROMPT, candidate[SYSTEM_PROMPT])

    def _write(self, search: Search | None, comparison: HeldOutComparison | None) -> SearchOutcome:
        """Write the published files from the library's last state."""
        if search is None:
            search = Search([dict(self.start)], [{}], 0, 0)
        plan, spec = self.plan, self.plan.spec
        outcome = SearchOutcome(
            plan.path, search, plan.start_prompt, search.candidates[search.best], comparison, self.journal.num_errors,
            self.reflect.num_calls, self._cost(plan.prepared.target.price), steady_time() - self.started,
            plan.path / EVALUATE if plan.path is not None and self._takes_prompt() else None,
        )  # fmt: skip
        if plan.path is None:
            return outcome
        self._keep_best(outcome.best)
        lines = search.frontier(lambda c, row: self.journal.has_reward(candidate_hash(c), f"val:{row}"))
        self.folder.write(FRONTIER, "".join(_json(line) + "\n" for line in lines))
        if outcome.evaluate is not None:
            self.folder.write(EVALUATE, evaluation_toml(spec, outcome.best_prompt))
        self.folder.write(METADATA, _json(_metadata(outcome, plan), indent=2) + "\n")
        return outcome

    def _cost(self, price: Price | None) -> float | None:
        return price.cost(*self.journal.tokens())["total_usd"] if price is not None else None

    def _takes_prompt(self) -> bool:
        """Whether setting the environment's system prompt changes what its rows ask."""
        env, probe = self.plan.prepared.env, "a prompt that no row has"
        before = getattr(env, "system_prompt", None)
        try:
            env.system_prompt = probe
            rows = getattr(env, "eval_dataset", None) or getattr(env, "dataset", None)
            prompt = rows[0]["prompt"] if rows is not None and len(rows) else []
        finally:
            env.system_prompt = before
        return bool(prompt) and prompt[0].get("content") == probe


def _metadata(outcome: SearchOutcome, plan: Optimisation) -> dict[str, Any]:
    search, split = outcome.search, plan.split
    averages = search.averages
    return {
        "num_candidates": len(search.candidates),
        "best_idx": search.best,
        "best_score": averages[search.best] if search.scores[0] else None,
        "total_metric_calls": search.num_calls,
        "completed_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "config": plan.spec.to_dict() | {"reflection_model": plan.reflection.model},
        "start_score": averages[0] if search.scores[0] else None,
        "start_prompt": outcome.start_prompt,
        "best_candidate": outcome.best,
        "num_iterations": search.num_iterations,
        "num_reflections": outcome.num_reflections,
        "num_failed_rollouts": outcome.num_errors,
        "num_rows": {"train": len(split.train), "val": len(split.val), "test": len(split.test)},
        "held_out": outcome.comparison.to_dict() if outcome.comparison is not None else None,
        "cost_usd": outcome.cost_usd,
        "time_s": outcome.time_s,
    }


class _LibraryLog:
    """What the library says of itself, in our log."""

    def log(self, message: str) -> None:
        """One message."""
        logger.debug("%s", message)


def _reflection_target(spec: GepaSpec, serve: Callable[[Path], Served]) -> Any:
    """Where the reflection model answers: an endpoint's id or a model directory by itself, else beside the model."""
    name = spec.reflection_model or spec.model
    here = spec.model_copy(update={"model": name})
    try:
        return find_target(here.model_copy(update={"api_base_url": None, "provider": None}), serve)
    except UserError:
        return find_target(here, serve)


def _path(spec: GepaSpec, prepared: Prepared) -> Path:
    """The folder of the run: as told, else beside the environment's source as its authors expect."""
    if spec.run_dir is not None:
        return Path(spec.run_dir)
    env_id = spec.env_id
    home = Path("environments") / env_id.rpartition("/")[2].partition("@")[0].replace("-", "_")
    base = (home if home.is_dir() else Path()) / "outputs" / "gepa"
    model = prepared.target.model.replace("/", "--")
    return base / f"{env_id.replace('/', '--')}--{model}" / os.urandom(4).hex()


def _json(value: Any, indent: int | None = None) -> str:

    return json.dumps(value, indent=indent, default=str)
