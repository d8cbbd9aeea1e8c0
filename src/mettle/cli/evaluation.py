"""One evaluation from the command line: find the model, load the environment, run, show, summarise.

Parts: `EvalRequest` (what was asked), `evaluate`. Invariant: the results folder is known before the first rollout, so
that whatever interrupts the evaluation, the message names the command that continues it.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from mettle.cli.endpoints import ENDPOINTS_FILE, read_endpoints
from mettle.cli.local_server import local_server
from mettle.cli.terminal import console, figure, going_on, print_json, print_next, print_table, seconds
from mettle.clients.config import ClientConfig
from mettle.clients.factory import client_from
from mettle.envs import load_environment
from mettle.envs.evaluation.results import ResultsFolder
from mettle.errors import ServiceError, UserError

DEFAULT_NUM_EXAMPLES = 5
DEFAULT_ROLLOUTS = 3
LINE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """What a person asked for. None leaves it to the resumed evaluation, then to the default."""

    env_id: str
    model: str
    api_base_url: str | None = None
    api_key_var: str | None = None
    num_examples: int | None = None
    rollouts_per_example: int | None = None
    max_concurrent: int = 32
    max_tokens: int | None = None
    temperature: float | None = None
    sampling_args: dict[str, Any] = field(default_factory=dict)
    env_args: dict[str, Any] = field(default_factory=dict)
    state_columns: tuple[str, ...] = ()
    output_dir: Path | None = None
    resume: Path | None = None
    max_retries: int = 3
    shuffle: bool = False
    shuffle_seed: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A model that answers somewhere."""

    client: ClientConfig
    model: str


def evaluate(request: EvalRequest, *, is_json: bool) -> None:
    """Run an evaluation and print what came of it.

    Raises: UserError for a request that cannot be met, ServiceError when not one rollout came to a reward.
    """
    env = load_environment(request.env_id, **request.env_args)
    saved = ResultsFolder(request.resume).read_metadata() if request.resume is not None else {}
    path = request.resume or _new_folder(request, env)
    with (
        going_on(f"`mettle eval run {request.env_id} -m {request.model} --resume {path}` runs what is missing"),
        _target(request) as target,
    ):
        results = asyncio.run(_run(request, env, target, path, saved, is_quiet=is_json))
    metadata = results["metadata"]
    if metadata["avg_reward"] is None:
        raise ServiceError(f"no rollout of {len(results['outputs'])} has a reward; {_first_error(results['outputs'])}")
    if is_json:
        print_json({"path": str(path), **metadata, "interval": interval(results["outputs"])})
    else:
        _print_summary(path, metadata, results["outputs"])


def interval(outputs: list[dict[str, Any]]) -> list[float] | None:
    """95 % confidence interval of the mean reward: normal, over the means of the tasks."""
    by_task: dict[Any, list[float]] = {}
    for output in outputs:
        if output.get("error") is None and output.get("reward") is not None:
            by_task.setdefault(output["example_id"], []).append(float(output["reward"]))
    means = [statistics.fmean(rewards) for rewards in by_task.values()]
    if len(means) < 2:
        return None
    half = 1.96 * statistics.stdev(means) / math.sqrt(len(means))
    mean = statistics.fmean(means)
    return [mean - half, mean + half]


@contextmanager
def _target(request: EvalRequest) -> Iterator[Target]:
    """The model: at the endpoint that was given, in a directory, or by its name in configs/endpoints.toml."""
    base_url, key = request.api_base_url, request.api_key_var
    named = read_endpoints().get(request.model)
    if base_url is not None:
        yield Target(ClientConfig(base_url, key, max_retries=request.max_retries), request.model)
    elif Path(request.model).is_dir():
        with local_server(Path(request.model), served_model_name=_name_of(Path(request.model))) as server:
            yield Target(ClientConfig(server.base_url, max_retries=request.max_retries), server.model)
    elif named is not None:
        config = ClientConfig(
            api_base_url=named.base_url,
            api_key_var=key or named.api_key_var,
            client_type=named.client_type,
            extra_headers=named.headers,
            max_retries=request.max_retries,
        )
        yield Target(config, named.model)
    else:
        raise UserError(
            f"{request.model!r} is no model directory and no endpoint in {ENDPOINTS_FILE}; "
            "say with -b where a server has it"
        )


async def _run(
    request: EvalRequest, env: Any, target: Target, path: Path, saved: dict[str, Any], *, is_quiet: bool
) -> Any:
    rollouts = request.rollouts_per_example or saved.get("rollouts_per_example") or DEFAULT_ROLLOUTS
    num_examples = request.num_examples or saved.get("num_examples") or DEFAULT_NUM_EXAMPLES
    sampling = {"max_tokens": request.max_tokens, "temperature": request.temperature}
    client = client_from(target.client)
    with _Progress(is_quiet=is_quiet) as progress:
        try:
            return await env.evaluate(
                client,
                target.model,
                {**{k: v for k, v in sampling.items() if v is not None}, **request.sampling_args},
                num_examples=num_examples,
                rollouts_per_example=rollouts,
                shuffle=request.shuffle or bool(saved.get("shuffle")),
                shuffle_seed=request.shuffle_seed if request.shuffle_seed is not None else saved.get("shuffle_seed"),
                max_concurrent=math.ceil(request.max_concurrent / rollouts),
                results_path=path,
                state_columns=list(request.state_columns),
                max_retries=request.max_retries,
                on_start=progress.start,
                on_progress=progress.advance,
            )
        finally:
            await client.close()
            await env.teardown()


class _Progress:
    """Rollouts done, and the reward as it moves: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._is_live = not is_quiet and sys.stderr.isatty()
        self._total = 0
        self._last_line = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Progress:
        if self._is_live:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
                console=Console(stderr=True),
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("rollouts", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, inputs: list[Any], remaining: list[Any]) -> None:
        self._total = len(inputs)
        if self._bar is not None:
            self._bar.update(self._task, total=self._total, completed=self._total - len(remaining))

    def advance(self, outputs: list[Any], _: list[Any], metadata: dict[str, Any]) -> None:
        text = f"reward {figure(metadata['avg_reward'])}, errors {metadata['avg_error']:.0%}"
        if self._bar is not None:
            self._bar.update(self._task, completed=len(outputs), description=text)
        elif not self._is_quiet and (len(outputs) == self._total or time.monotonic() - self._last_line > LINE_EVERY_S):
            self._last_line = time.monotonic()
            click.echo(f"{len(outputs)}/{self._total} rollouts, {text}", err=True)


def _new_folder(request: EvalRequest, env: Any) -> Path:
    """Where results go: beside the environment's source when that is here, as its authors expect."""
    env_id = str(getattr(env, "env_id", "") or request.env_id)
    home = Path("environments") / env_id.rpartition("/")[2].partition("@")[0].replace("-", "_")
    base = request.output_dir or (home if home.is_dir() else Path()) / "outputs" / "evals"
    model = _name_of(Path(request.model)) if Path(request.model).is_dir() else request.model
    return base / f"{env_id.replace('/', '--')}--{model.replace('/', '--')}" / os.urandom(4).hex()


def _name_of(model_dir: Path) -> str:
    """What to call a model directory: its own name, after its run's where it stands in one."""
    path = model_dir.resolve()
    return f"{path.parent.name}/{path.name}" if (path.parent / "run.db").exists() else path.name


def _first_error(outputs: list[dict[str, Any]]) -> str:
    error = next((output["error"] for output in outputs if output.get("error")), None)
    if error is None:
        return "the environment gave none"
    return f"the first failed with {error.get('error')}: {error.get('message') or error.get('error_chain_str')}"


def _print_summary(path: Path, metadata: dict[str, Any], outputs: list[dict[str, Any]]) -> None:
    bounds = interval(outputs)
    shown = f" (95 % interval {bounds[0]:.3f} to {bounds[1]:.3f})" if bounds else ""
    rows = [("reward", f"{metadata['avg_reward']:.4f}{shown}")]
    rows += [(name, figure(value)) for name, value in metadata["avg_metrics"].items()]
    threshold = f" (reward of {figure(metadata.get('pass_threshold', 0.5))} or more)"
    rows += [(f"pass@{k}", figure(value) + threshold) for k, value in metadata["pass_at_k"].items()]
    rows.append(("rollouts", f"{len(outputs)}, {metadata['avg_error']:.1%} failed"))
    usage = metadata.get("usage")
    if usage:
        rows.append(("tokens", f"{usage['input_tokens']:.0f} in, {usage['output_tokens']:.0f} out a rollout"))
    rows += [("time", seconds(metadata["time"])), ("saved in", str(path))]
    print_table(("", ""), rows, title=f"{metadata['env_id']} with {metadata['model']}")
    if metadata["avg_error"]:
        console().print(_first_error(outputs), markup=False)
    print_next(f"mettle eval view {path}")
