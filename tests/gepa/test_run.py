"""Whole searches with the real library: what they find, what they leave behind, and how they end."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mettle.config import load_config
from mettle.config.options import Given
from mettle.config.overrides import parse_overrides
from mettle.errors import ServiceError, UserError
from mettle.evals.entries import evaluations_in
from mettle.evals.reader import EvaluationReader
from mettle.gepa.config import GepaSpec
from mettle.gepa.outputs import RunFolder
from mettle.gepa.run import SearchOutcome, prepare, resumed

pytest.importorskip("gepa")

SMALL = {"max_calls": 160, "num_train": 12, "num_val": 12, "num_test": 12, "max_concurrent": 4, "max_retries": 0}


@pytest.fixture
def optimise(workplace: Path, endpoint: Any) -> Callable[..., SearchOutcome]:
    """Run a small search with these settings on top."""

    def run(**settings: Any) -> SearchOutcome:
        given = {
            "env_id": "three-kinds", "model": "worker", "reflection_model": "writer", "api_base_url": endpoint.url,
            **SMALL, **settings,
        }  # fmt: skip
        return prepare(load_config(GepaSpec, overrides=given).config, _no_server).run(lambda _: None, lambda _: None)

    return run


def _no_server(path: Path) -> tuple[str, str]:
    raise AssertionError(f"nothing to serve in {path}")


def test_a_search_finds_the_rules_and_says_what_they_are_worth_on_rows_it_never_saw(optimise, endpoint):
    outcome = optimise()
    assert {"rule add", "rule join", "rule first"} <= set(outcome.best_prompt.splitlines())
    assert outcome.best_prompt.startswith("Answer.")
    assert outcome.search.averages[0] == 0.0
    assert outcome.search.averages[outcome.search.best] == 1.0
    found = outcome.comparison
    assert (found.num_rows, found.before.mean, found.after.mean, found.difference.mean) == (12, 0.0, 1.0, 1.0)
    assert endpoint.num_reflections == outcome.num_reflections >= 3


def test_the_published_files_are_written(optimise, workplace):
    outcome = optimise()
    folder = outcome.path
    assert folder.parent == Path("environments/three_kinds/outputs/gepa/three-kinds--worker")
    assert (folder / "best_prompt.txt").read_text() == outcome.best_prompt
    lines = [json.loads(line) for line in (folder / "pareto_frontier.jsonl").read_text().splitlines()]
    assert [line["valset_row"] for line in lines] == list(range(12))
    best = outcome.search.best
    for line in lines:
        assert set(line) == {"valset_row", "best_score", "num_best_prompts", "best_prompts"}
        assert line["best_score"] == 1.0
        assert line["num_best_prompts"] == len(line["best_prompts"])
        assert best in [prompt["candidate_idx"] for prompt in line["best_prompts"]]
        assert set(line["best_prompts"][0]) == {"candidate_idx", "system_prompt", "score"}
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["best_idx"] == best
    assert metadata["best_score"] == 1.0
    assert metadata["num_candidates"] == len(outcome.search.candidates)
    assert metadata["total_metric_calls"] == outcome.search.num_calls
    assert metadata["config"]["max_calls"] == 160
    assert metadata["held_out"]["difference"]["mean"] == 1.0
    assert {"completed_at"} <= set(metadata)


def test_the_evaluation_that_is_written_asks_with_the_best_prompt(optimise, endpoint):
    from mettle.envs.packages.eval_defaults import package_defaults
    from mettle.evals.plan import read_plan

    outcome = optimise()
    (spec,) = [loaded.config for loaded in read_plan([outcome.evaluate], Given(), package_defaults)]
    assert spec.extra_env_kwargs == {"system_prompt": outcome.best_prompt}
    assert (spec.env_id, spec.model, spec.api_base_url) == ("three-kinds", "worker", endpoint.url)


def test_the_same_seed_searches_alike_and_another_does_not(optimise):
    first, again, other = optimise(), optimise(), optimise(seed=7)
    assert first.search == again.search
    assert first.search.candidates != other.search.candidates


def test_no_side_shares_a_row_with_another(optimise, endpoint):
    outcome = optimise()
    sides: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    kinds = set()
    for entry in evaluations_in(outcome.path):
        reader = EvaluationReader(outcome.path, entry.eval_id)
        kinds.add(entry.kind)
        assert (entry.state, entry.num_rollouts) == ("finished", entry.planned_rollouts)
        for index, record in reader.records():
            sides[reader.facts[index].example_id.split(":")[0]].add(record.prompt[-1]["content"])
    assert kinds == {"search", "held_out"}
    assert all(sides.values())
    assert not sides["train"] & sides["val"]
    assert not sides["val"] & sides["test"]
    assert not sides["train"] & sides["test"]


def test_a_failed_rollout_counts_neither_way_and_is_told_to_the_reflection(optimise, endpoint):
    """Every fourth validation row and one training row in three answer with status 500."""

    def fail(model: str, body: dict[str, Any]) -> int | None:
        return 500 if model == "worker" and body["messages"][-1]["content"].split()[2].endswith(("3", "8")) else None

    endpoint.fail = fail
    outcome = optimise(env_args={"num_rows": 30})
    assert outcome.num_errors > 0
    assert outcome.search.averages[outcome.search.best] == 1.0, "the rows that could be scored are all right"
    lines = [json.loads(line) for line in (outcome.path / "pareto_frontier.jsonl").read_text().splitlines()]
    unscored = [line for line in lines if line["best_score"] is None]
    assert unscored
    assert all(line["best_prompts"] == [] for line in unscored)
    assert outcome.comparison.num_rows < 12
    told = [text for model, text in endpoint.asked if model == "writer" and "failed and has no reward" in text]
    assert told


def test_an_endpoint_that_refuses_ends_the_search_at_once_and_in_one_line(optimise, endpoint):
    endpoint.fail = lambda model, body: 401 if model == "worker" else None
    with pytest.raises(UserError, match="401"):
        optimise()
    assert len(endpoint.asked) <= 8


def test_a_reflection_model_that_keeps_failing_ends_the_search_and_leaves_the_files(optimise, endpoint, workplace):
    endpoint.fail = lambda model, body: 400 if model == "writer" else None
    with pytest.raises(ServiceError, match="the reflection model failed 3 times in a row"):
        optimise(run_dir="here")
    assert (workplace / "here" / "best_prompt.txt").read_text() == "Answer."


def test_a_budget_is_kept_to_within_the_round_that_crosses_it(optimise, endpoint):
    outcome = optimise(max_calls=40, num_test=0)
    assert 40 <= outcome.search.num_calls <= 40 + 2 * 3 + 12
    assert sum(endpoint.worked.values()) == outcome.search.num_calls
    assert outcome.comparison is None


def test_nothing_is_saved_when_that_is_asked(optimise, workplace):
    before = sorted(workplace.rglob("*"))
    outcome = optimise(save_results=False)
    assert outcome.path is None
    assert "rule add" in outcome.best_prompt
    assert [
        path for path in sorted(workplace.rglob("*")) if path not in before and "__pycache__" not in path.parts
    ] == []


def test_a_prompt_can_be_given_to_start_from(optimise):
    outcome = optimise(seed_prompt="rule add\nrule join\nrule first")
    assert outcome.search.averages[0] == 1.0
    assert outcome.search.best == 0
    assert outcome.comparison.difference.mean == 0.0


def test_resuming_a_finished_search_asks_nothing_again(optimise, endpoint, workplace):
    outcome = optimise(run_dir="here")
    endpoint.asked.clear()
    again = prepare(resumed(Path("here")).config, _no_server).run(lambda _: None, lambda _: None)
    assert endpoint.asked == []
    assert again.search == outcome.search
    assert again.comparison == outcome.comparison


def test_a_search_that_is_cut_in_two_is_the_search_in_one_piece(optimise, endpoint, workplace):
    whole = optimise(run_dir="whole", max_concurrent=1)
    num_asked = len(endpoint.asked)
    for cut in (20, 45, 71, 90):
        endpoint.asked.clear()
        plan = prepare(_spec(endpoint, run_dir=f"cut{cut}", max_concurrent=1), _no_server)
        with pytest.raises(KeyboardInterrupt):
            plan.run(_interrupting(cut), lambda _: None)
        again = prepare(resumed(Path(f"cut{cut}")).config, _no_server)
        outcome = again.run(lambda _: None, lambda _: None)
        assert outcome.search == whole.search
        assert outcome.comparison == whole.comparison
        assert len(endpoint.asked) <= num_asked + 1, "at most the rollout that was in flight is repeated"


def _spec(endpoint: Any, **settings: Any) -> Any:
    given = {
        "env_id": "three-kinds", "model": "worker", "reflection_model": "writer", "api_base_url": endpoint.url,
        **SMALL, **settings,
    }  # fmt: skip
    return load_config(GepaSpec, overrides=given).config


def _interrupting(at: int) -> Callable[[Any], None]:
    """Presses Ctrl-C after so many rollouts, wherever the main thread is."""
    import _thread

    def show(progress: Any) -> None:
        if progress.num_rollouts == at:
            _thread.interrupt_main()

    return show


def test_another_search_is_not_resumed_by_mistake(optimise):
    optimise(run_dir="here", num_test=0, max_calls=20)
    with pytest.raises(UserError, match="cannot resume here with another seed: it has 0, not 5"):
        resumed(Path("here"), given=Given(overrides=tuple(parse_overrides(["--seed", "5"]))))
    with pytest.raises(UserError, match="no prompt optimisation in nowhere"):
        resumed(Path("nowhere"))


def test_a_state_that_would_run_code_is_not_loaded(optimise, tmp_path):
    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "pwned"), "w"))

    optimise(run_dir="here", num_test=0, max_calls=20)
    (Path("here") / "gepa_state.bin").write_bytes(pickle.dumps({"program_candidates": Evil()}))
    with pytest.raises(UserError, match=r"not a state that this program wrote \(it names .*open\)"):
        RunFolder(Path("here")).search()
    with pytest.raises(UserError, match="it was not loaded"):
        prepare(resumed(Path("here")).config, _no_server)
    assert not (tmp_path / "pwned").exists()


def test_two_processes_do_not_write_one_run(optimise, workplace):
    import subprocess
    import sys

    code = (
        "import fcntl, os, sys; f = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT);"
        " fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )
    (workplace / "here").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", code, "here/.writer.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match="being written to by another process"):
        optimise(run_dir="here")
    holder.stdin.close()
    holder.wait()
    holder.stdout.close()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"max_calls": 10}, "10 calls pay for no round: 12 validation rows and two minibatches of 3 are 18"),
        ({"tool_descriptions": True}, "three-kinds has no tools whose descriptions could be optimised"),
        ({"env_args": {"num_rows": 1}}, "2 different rows cannot be split into 3 sides"),
    ],
)
def test_what_cannot_work_is_one_line(optimise, settings, complaint):
    with pytest.raises(UserError, match=complaint):
        optimise(**settings)


TOOL_MODULE = '''
import mettle.envs as vf

def load_environment():
    def look_up(word: str) -> str:
        """Find a word.

        Args:
            word: what to find
        """
        return word.upper()

    def exact(completion, answer, **_):
        return float(completion[-1]["content"] == answer)

    rows = [{"question": f"first {index} 1", "answer": str(index)} for index in range(40)]
    return vf.ToolEnv(dataset=rows, tools=[look_up], rubric=vf.Rubric(funcs=[exact]), system_prompt="rule first")
'''


def test_tool_descriptions_are_candidates_too_and_are_what_the_model_is_shown(workplace, endpoint):
    folder = workplace / "environments" / "looker"
    folder.mkdir()
    (folder / "looker.py").write_text(TOOL_MODULE)
    (folder / "pyproject.toml").write_text('[project]\nname = "looker"\nversion = "0.1.0"\n')
    shown: set[str] = set()

    def work(model: str, body: dict[str, Any]) -> int | None:
        if model == "worker":
            shown.add(body["tools"][0]["function"]["description"])
        return None

    endpoint.fail = work
    spec = _spec(endpoint, env_id="looker", tool_descriptions=True, num_test=0, max_calls=60, seed_prompt="Answer.")
    outcome = prepare(spec, _no_server).run(lambda _: None, lambda _: None)
    assert set(outcome.best) == {"system_prompt", "tool:look_up"}
    assert "Find a word." in shown
    rewritten = {candidate["tool:look_up"] for candidate in outcome.search.candidates} - {"Find a word."}
    assert rewritten <= shown
    assert outcome.search.averages[outcome.search.best] == 1.0
    lines = [json.loads(line) for line in (outcome.path / "pareto_frontier.jsonl").read_text().splitlines()]
    assert set(lines[0]["best_prompts"][0]["components"]) == {"tool:look_up"}
