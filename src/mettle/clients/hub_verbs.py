"""The verbs of a Hub's clients, each written once, as the requests that it takes.

Parts: `HubVerbs`, with `VerbsAtOnce` and `AwaitedVerbs`, which the clients are; `Verb`, which makes of a generator of
requests a method that answers at once in `mettle.Client`, and is awaited in `mettle.AsyncClient`. What a verb gives is
what the Hub answers (docs/reference/hub-api.md). Raises from each: UserError for what the Hub refuses, ServiceError
when it does not answer.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, Concatenate, Final, Generic, Literal, ParamSpec, TypeVar, overload

from mettle.clients.hub_requests import ApiRequest, Steps, own_path, part, slug_parts

P = ParamSpec("P")
T = TypeVar("T")
Found = dict[str, Any]
PIECE_BYTES: Final = 8 << 20
MAX_PAGE: Final = 100


class Verb(Generic[P, T]):
    """A method of both clients, from the requests that it takes."""

    def __init__(self, steps: Callable[Concatenate[HubVerbs, P], Steps[T]]) -> None:
        self._steps, self.__doc__ = steps, steps.__doc__

    @overload
    def __get__(self, client: VerbsAtOnce, owner: type | None = None) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AwaitedVerbs, owner: type | None = None) -> Callable[P, Awaitable[T]]: ...
    @overload
    def __get__(self, client: None, owner: type | None = None) -> Verb[P, T]: ...

    def __get__(self, client: Any, owner: type | None = None) -> Any:
        if client is None:
            return self
        return update_wrapper(partial(self._ask, client), self._steps)

    def _ask(self, client: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return client.carry_out(self._steps(client, *args, **kwargs))


class HubVerbs:
    """What one asks of a Hub."""

    @Verb
    def whoami(self) -> Steps[Found]:
        """Who the token belongs to, and what it covers."""
        return (yield from _one(ApiRequest("GET", "/user/whoami"), "data"))

    @Verb
    def teams(self) -> Steps[list[Found]]:
        """My teams; `teamId` is what other verbs take as `team_id`."""
        return (yield from _many(ApiRequest("GET", "/user/teams"), "data"))

    @Verb
    def environments(
        self, words: str | None = None, *, owner: str | None = None, limit: int = 20, offset: int = 0
    ) -> Steps[list[Found]]:
        """Environments with words in their names, descriptions, tags, READMEs or tasks; all without words."""
        params = {"search": words, "owner": owner, "limit": limit, "offset": offset}
        return (yield from _many(ApiRequest("GET", "/environmentshub/", params), "data"))

    @Verb
    def environment(self, slug: str) -> Steps[Found]:
        """One release, of `owner/name` or `owner/name@version`."""
        name, version = slug_parts(slug)
        return (yield from _one(ApiRequest("GET", f"/environmentshub/{name}/@{part(version)}"), "data"))

    @Verb
    def versions(self, slug: str) -> Steps[list[Found]]:
        """The releases of `owner/name`."""
        return (
            yield from _many(ApiRequest("GET", f"/environmentshub/{slug_parts(slug)[0]}/versions"), "data", "versions")
        )

    @Verb
    def download_environment(self, slug: str, target: Path, kind: Literal["wheel", "source"] = "wheel") -> Steps[Path]:
        """Save the wheel or the source archive of a release as `target`."""
        name, version = slug_parts(slug)
        found = (yield ApiRequest("GET", f"/environmentshub/{name}/@{part(version)}"))["data"]
        url = found["wheel_url" if kind == "wheel" else "package_url"]
        yield ApiRequest("GET", own_path(url), root="", target=target)
        return target

    @Verb
    def evaluations(self, *, environment: str | None = None, limit: int = 20, skip: int = 0) -> Steps[list[Found]]:
        """Pushed evaluations, the newest first."""
        params = {"environment_name": environment, "limit": limit, "skip": skip}
        return (yield from _many(ApiRequest("GET", "/evaluations/", params), "evaluations"))

    @Verb
    def evaluation(self, evaluation_id: str) -> Steps[Found]:
        """One evaluation with its mean and interval."""
        return (yield ApiRequest("GET", f"/evaluations/{part(evaluation_id)}"))

    @Verb
    def samples(self, evaluation_id: str, *, limit: int | None = None) -> Steps[list[Found]]:
        """The samples of a completed evaluation, all or the first `limit`, page by page."""
        found: list[Found] = []
        page = 1
        while True:
            params = {"limit": MAX_PAGE, "page": page}
            answer = yield ApiRequest("GET", f"/evaluations/{part(evaluation_id)}/samples", params)
            found += answer["samples"]
            if not answer["has_more"] or (limit is not None and len(found) >= limit):
                return found[:limit]
            page += 1

    @Verb
    def push_evaluation(
        self,
        name: str,
        environment: str,
        samples: Iterable[Mapping[str, Any]],
        *,
        model: str = "",
        metadata: Mapping[str, Any] | None = None,
        is_public: bool = False,
        framework: str = "mettle",
        team_id: str | None = None,
    ) -> Steps[Found]:
        """Push samples in the field's format (rows of `results.jsonl`); the Hub works out mean and interval."""
        body = {
            "name": name, "environment": environment, "model_name": model, "framework": framework,
            "is_public": is_public, "metadata": dict(metadata or {}), "team_id": team_id,
        }  # fmt: skip
        made = yield ApiRequest("POST", "/evaluations/", json=body)
        base = f"/evaluations/{made['evaluation_id']}"
        for piece in _pieces(samples):
            yield ApiRequest("POST", f"{base}/samples", content=piece)
        return (yield ApiRequest("POST", f"{base}/finalize", json={}))

    @Verb
    def leaderboard(self, environment: str) -> Steps[list[Found]]:
        """The models on an environment, the highest mean first, with the places that the intervals leave open."""
        return (yield from _many(ApiRequest("GET", "/evaluations/leaderboard", {"environment": environment}), "places"))

    @Verb
    def compare(self, evaluation_ids: Iterable[str]) -> Steps[Found]:
        """Evaluations on the tasks that all have, each pair's difference paired by task."""
        return (yield ApiRequest("POST", "/evaluations/compare", json={"evaluation_ids": list(evaluation_ids)}))

    @Verb
    def start_run(self, config: Mapping[str, Any]) -> Steps[Found]:
        """Queue a hosted run from a hosted-training config, as its TOML is."""
        return (yield from _one(ApiRequest("POST", "/rft/runs", json=dict(config)), "run"))

    @Verb
    def runs(self, *, limit: int = 20, page: int = 1) -> Steps[list[Found]]:
        """Hosted runs, mine and my teams', the newest first."""
        return (yield from _many(ApiRequest("GET", "/rft/runs", {"limit": limit, "page": page}), "runs"))

    @Verb
    def run(self, run_id: str) -> Steps[Found]:
        """One hosted run."""
        return (yield from _one(ApiRequest("GET", f"/rft/runs/{part(run_id)}"), "run"))

    @Verb
    def run_metrics(self, run_id: str, *, min_step: int | None = None) -> Steps[list[Found]]:
        """What a hosted run has measured, a row for each step."""
        return (
            yield from _many(ApiRequest("GET", f"/rft/runs/{part(run_id)}/metrics", {"min_step": min_step}), "metrics")
        )

    @Verb
    def run_logs(self, run_id: str, *, component: str = "orchestrator", tail_lines: int = 1000) -> Steps[str]:
        """The end of what one process of a hosted run writes."""
        params = {"component": component, "tail_lines": tail_lines}
        return str((yield ApiRequest("GET", f"/rft/runs/{part(run_id)}/logs", params))["logs"])

    @Verb
    def stop_run(self, run_id: str) -> Steps[Found]:
        """End a hosted run after the step that it is in."""
        return (yield from _one(ApiRequest("PUT", f"/rft/runs/{part(run_id)}/stop"), "run"))

    @Verb
    def restart_run(self, run_id: str, *, step: int | None = None) -> Steps[Found]:
        """Let a hosted run go on; with `step`, queue a new one that begins from that version of it."""
        return (yield from _one(ApiRequest("PUT", f"/rft/runs/{part(run_id)}/restart", {"step": step}), "run"))

    @Verb
    def checkpoints(self, run_id: str) -> Steps[list[Found]]:
        """The versions of a hosted run that are on disk."""
        return (yield from _many(ApiRequest("GET", f"/rft/runs/{part(run_id)}/checkpoints"), "checkpoints"))

    @Verb
    def download_checkpoint(self, run_id: str, step: int, target: Path) -> Steps[Path]:
        """Save a version as a tar: an adapter as peft loads it, or whole weights."""
        yield ApiRequest("GET", f"/rft/runs/{part(run_id)}/checkpoints/{step}", target=target)
        return target

    @Verb
    def usage(self, month: str | None = None) -> Steps[Found]:
        """Tokens of hosted jobs by owner, of a month like 2026-11; of this one without."""
        return (yield ApiRequest("GET", "/usage", {"month": month}))


class VerbsAtOnce(HubVerbs):
    """For a client that waits."""

    def carry_out(self, steps: Steps[T]) -> T:
        """Send the requests of a verb, one after the other; what it gives in the end."""
        raise NotImplementedError


class AwaitedVerbs(HubVerbs):
    """For a client that is awaited."""

    async def carry_out(self, steps: Steps[T]) -> T:
        """Send the requests of a verb, one after the other; what it gives in the end."""
        raise NotImplementedError


def _one(request: ApiRequest, *keys: str) -> Steps[Found]:
    """The object that an answer has under these keys, one inside the other."""
    found: Found = yield request
    for key in keys:
        found = found[key]
    return found


def _many(request: ApiRequest, *keys: str) -> Steps[list[Found]]:
    """The list that an answer has there."""
    found: Any = yield request
    for key in keys:
        found = found[key]
    rows: list[Found] = found
    return rows


def _pieces(samples: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Samples as bodies of requests of a size that arrives. What JSON has no form for is sent as its text."""
    piece: list[str] = []
    num_bytes = 0
    for sample in samples:
        written = json.dumps(sample, default=str)
        if piece and num_bytes + len(written) > PIECE_BYTES:
            yield _body(piece)
            piece, num_bytes = [], 0
        piece.append(written)
        num_bytes += len(written)
    if piece:
        yield _body(piece)


def _body(piece: list[str]) -> bytes:
    return f'{{"samples": [{", ".join(piece)}]}}'.encode()
