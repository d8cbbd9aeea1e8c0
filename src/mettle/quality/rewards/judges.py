"""A judge that is a rule, so that an environment with a judge model can be tried without one.

Parts: `StandInJudge`, `standing_in`. It takes the place of the judge in every `JudgeRubric`. Invariant: it
says yes exactly when the answer that it is shown holds one of the right answers it knows, so what is tested is that the
question, the answer and the verdict reach their places, not the judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mettle.clients.base import Client
from mettle.envs.rubrics.judge_client import JudgeClient
from mettle.envs.rubrics.judge_rubric import JudgeRubric
from mettle.records.messages import Response, ResponseMessage, Usage, content_text


class StandInJudge(Client):
    """Speaks as a Mettle client and as an OpenAI client. `golds` are the answers it says yes to."""

    def __init__(self) -> None:
        self.golds: set[str] = set()
        self.chat = JudgeClient(self)

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any = None, tools: Any = None, **_: Any
    ) -> Response:
        """The verdict as a response."""
        message = ResponseMessage(content=self.verdict(prompt), finish_reason="stop", is_truncated=False)
        usage = Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0)
        return Response(id="judge", created=0, model=model, usage=usage, message=message)

    def verdict(self, prompt: Any) -> str:
        """`yes` when one of the right answers stands twice in the prompt: as the reference and as the answer."""
        text = prompt if isinstance(prompt, str) else "\n".join(content_text(m.get("content")) for m in prompt)
        return "yes" if any(_count(gold, text) >= 2 for gold in self.golds) else "no"


@contextmanager
def standing_in(rubric: Any, judge: StandInJudge) -> Iterator[int]:
    """Put `judge` in place of the judges of `rubric` and of those in it; how many there were."""
    places = [each for each in _rubrics(rubric) if isinstance(each, JudgeRubric)]
    before = [(each, each.judge_client, each._judge) for each in places]
    for each in places:
        _put(each, judge, JudgeClient(judge))
    try:
        yield len(places)
    finally:
        for each, client, asked in before:
            _put(each, client, asked)


def _put(rubric: JudgeRubric, client: Any, asked: JudgeClient) -> None:
    rubric.judge_client, rubric._judge = client, asked
    rubric.class_objects["judge_client"] = client


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    for member in getattr(rubric, "rubrics", None) or []:
        yield from _rubrics(member)


def _count(gold: str, text: str) -> int:
    return len(re.findall(rf"(?<!not )(?<!\w){re.escape(gold)}(?!\w)", text))
