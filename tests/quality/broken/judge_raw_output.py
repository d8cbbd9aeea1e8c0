"""The output can talk to the judge."""

from __future__ import annotations

import mettle.envs as vf

ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a in range(3, 9) for b in range(5, 10)]


async def correct(completion, answer, judge, parser):
    response = parser.parse_answer(completion) or ""
    prompt = f"The right answer is {answer}. A student wrote: {response}. Is it right? Say yes or no."
    verdict = await judge.get_response(prompt=[{"role": "user", "content": prompt}], model="judge")
    return float("yes" in verdict.message.content)


class Judge(vf.Client):
    """Says yes when the reference and the student agree."""

    async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
        text = prompt[0]["content"]
        gold = text.partition("is ")[2].partition(".")[0]
        said = "yes" if f"wrote: {gold}." in text else "no"
        message = vf.ResponseMessage(content=said, finish_reason="stop", is_truncated=False)
        return vf.Response(id="", created=0, model=model, usage=None, message=message)


def load_environment() -> vf.SingleTurnEnv:
    rubric = vf.Rubric(funcs=[correct])
    rubric.add_class_object("judge", Judge())
    return vf.SingleTurnEnv(dataset=ROWS, rubric=rubric)
