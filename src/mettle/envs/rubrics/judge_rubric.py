"""Rewards by a judge model.

Parts: `JudgeRubric`. It scores nothing by itself: a reward function asks for `judge` by name and reads the verdict.
Invariants: what the judge was asked and what it said is kept in `state["judge_calls"]`; the same question about one
rollout is asked once, also by functions that run side by side; a judge that fails leaves the rollout without a reward.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any

from mettle.clients.errors import AuthenticationError, InvalidModelResponseError, ModelError, one_line
from mettle.envs.decorators import teardown
from mettle.envs.parsers.parser import Parser, message_text
from mettle.envs.rubrics.function import RewardFunction
from mettle.envs.rubrics.judge_client import JudgeClient
from mettle.envs.rubrics.judge_prompt import DEFAULT_JUDGE_PROMPT, question_of, render
from mettle.envs.rubrics.rubric import RewardFunc, Rubric
from mettle.envs.state import State
from mettle.errors import JudgeError, MettleError
from mettle.records.messages import Response
from mettle.web.backoff import Backoff

BACKOFF = Backoff(first_s=0.5, max_s=20.0)


class JudgeRubric(Rubric):
    """A rubric whose functions may ask for `judge`, `judge_client`, `judge_model`, `judge_prompt`.

    `judge_client`: an `AsyncOpenAI`, a `ClientConfig`, a base URL, a `Client`; None is api.openai.com, with the key in
    OPENAI_API_KEY. `fence_material` puts question, answer and response between lines that they cannot contain; None
    does so with the default prompt only. `max_judge_retries` bounds tries after an answer that says nothing, and,
    for a client that does not try again itself, after any failure of the endpoint.
    """

    def __init__(
        self,
        parser: Parser | None = None,
        parallelize_scoring: bool = False,
        judge_client: Any = None,
        judge_model: str = "gpt-4.1-nano",
        judge_sampling_args: Mapping[str, Any] | None = None,
        judge_prompt: str = DEFAULT_JUDGE_PROMPT,
        *,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        fence_material: bool | None = None,
        max_judge_retries: int = 2,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        **kwargs: Any,
    ) -> None:
        super().__init__(funcs, weights, parser, parallelize_scoring, **kwargs)
        self._judge = judge_client if isinstance(judge_client, JudgeClient) else JudgeClient(judge_client)
        self.judge_client = judge_client if hasattr(judge_client, "chat") else self._judge
        self.judge_model = judge_model
        self.judge_prompt = judge_prompt
        self.judge_sampling_args = dict(judge_sampling_args or {})
        self.fence_material = judge_prompt == DEFAULT_JUDGE_PROMPT if fence_material is None else fence_material
        self.max_judge_retries = max_judge_retries
        self._sleep = sleep
        self._asking: dict[tuple[int, str], _Question] = {}
        self.class_objects.update(
            judge=self.judge,
            judge_client=self.judge_client,
            judge_model=judge_model,
            judge_prompt=judge_prompt,
            judge_sampling_args=self.judge_sampling_args,
        )

    def judge(self, prompt: Any, completion: Any, answer: Any, state: State | None = None, **_: Any) -> Any:
        """What the judge says about `completion`. With `state`, it is asked once and both sides are kept.

        An awaitable; and with an `OpenAI` object as judge, a plain function that runs in its thread gets the text
        itself, as authors wrote it for verifiers 0.1.2.
        Raises: JudgeError when it cannot be asked, or says nothing.
        """
        text = render(
            self.judge_prompt, question_of(prompt), answer, self._response(completion), is_fenced=self.fence_material
        )
        if self._judge.is_blocking and not _in_event_loop():
            known = {} if state is None else state.setdefault("judge_response", {})
            if isinstance(known, dict) and text not in known:
                known[text] = asyncio.run(self._ask(text, state))
            return JudgeVerdict(known[text] if isinstance(known, dict) else asyncio.run(self._ask(text, state)))
        return self._verdict(text, state)

    async def _verdict(self, text: str, state: State | None) -> str:
        if state is None:
            return await self._ask(text, None)
        known = state.setdefault("judge_response", {})
        if isinstance(known, dict) and text in known:
            return str(known[text])
        said = await self._ask_once(text, state)
        if isinstance(known, dict):
            known[text] = said
        return said

    def _function(self, func: RewardFunc) -> RewardFunction:
        """A plain function of an `OpenAI` judge asks it and waits, so it runs in a thread from the start."""
        found = self._functions.get(id(func))
        if found is None or found.function is not func:
            waits = self._judge.is_blocking and not inspect.iscoroutinefunction(func)
            found = RewardFunction(func, self.func_timeout_seconds, "thread" if waits else None)
            self._functions[id(func)] = found
        return found

    @teardown
    async def close_judge(self) -> None:
        """Let go of the judge's connections."""
        await self._judge.close()

    def _response(self, completion: Any) -> str:
        parsed = self.parser.parse_answer(completion)
        return "" if parsed is None else str(parsed)

    async def _ask_once(self, text: str, state: State) -> str:
        """One request for everybody who asks the same of this rollout at the same time.

        It goes on until the last of them has given up: one's limit is no answer for the others.
        """
        key = (id(state), text)
        question = self._asking.get(key)
        if question is None:
            question = self._asking[key] = _Question(asyncio.ensure_future(self._ask(text, state)))
            question.answer.add_done_callback(lambda _: self._asking.pop(key, None))
        return await question.asked()

    async def _ask(self, text: str, state: State | None) -> str:
        call: dict[str, Any] = {"model": self.judge_model, "prompt": text, "response": None, "error": None}
        if state is not None:
            state.setdefault("judge_calls", []).append(call)
        started = time.monotonic()
        try:
            response = await self._response_to(text)
        except MettleError as error:
            call["error"] = one_line(str(error))
            raise JudgeError(f"judge {self.judge_model}: {call['error']}") from error
        finally:
            call["duration_s"] = time.monotonic() - started
        call["response"] = message_text(response.message)
        call["usage"] = dict(response.usage) if response.usage else None
        return str(call["response"])

    async def _response_to(self, text: str) -> Response:
        attempt = 0
        while True:
            try:
                return _speaking(await self._judge.ask(self.judge_model, text, self._sampling_args()))
            except ModelError as error:
                if attempt >= self.max_judge_retries or not self._may_help(error):
                    raise
            await self._sleep(BACKOFF.wait_s(attempt))
            attempt += 1

    def _may_help(self, error: ModelError) -> bool:
        """Whether asking again may help: after an empty answer, or a failure that nobody below tried again."""
        if isinstance(error, AuthenticationError):
            return False
        return isinstance(error, InvalidModelResponseError) or not self._judge.retries_itself

    def _sampling_args(self) -> dict[str, Any]:
        arguments = {name: value for name, value in self.judge_sampling_args.items() if value is not None}
        if "max_tokens" in arguments and "openai.com" in str(getattr(self._judge.client, "base_url", "")):
            arguments.setdefault("max_completion_tokens", arguments.pop("max_tokens"))
        return arguments


class _Question:
    """A request under way, and how many wait for it."""

    def __init__(self, answer: asyncio.Future[str]) -> None:
        self.answer = answer
        self._num_waiting = 0

    async def asked(self) -> str:
        """The answer, for one more."""
        self._num_waiting += 1
        try:
            return await asyncio.shield(self.answer)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self.answer.cancel()


class JudgeVerdict(str):
    """What the judge said; it may be awaited, too."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, str]:
        yield from ()
        return str(self)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _speaking(response: Response) -> Response:
    """Raises: InvalidModelResponseError when the judge says nothing that could be read as a verdict."""
    if not message_text(response.message).strip():
        reason = response.message.finish_reason
        raise InvalidModelResponseError(f"it answered without text (finish reason {reason!r}; is max_tokens too low?)")
    return response
