"""Makes `data/sums.eval`, a log by Inspect itself with its mock model. It needs `inspect_ai` and `openai`, which Mettle
does not: `pip install inspect_ai openai` in an environment of its own, then `python inspect_log_made.py FOLDER`.

Three tasks, twice each: one is answered by a call of a tool, one is wrong and long, one breaks its solver.
"""

import sys

WRONG = "It is 2. " + "Longer than what a log keeps in its place. " * 4


class _Bytes:
    """In the place of a tokenizer that would be fetched."""

    def encode(self, text, **_):
        return list(text.encode())


def answer(messages, *_):
    from inspect_ai.model import ContentReasoning, ContentText, ModelOutput, ModelUsage

    asked = messages[-1]
    if asked.role == "user" and "1 + 1" in asked.text:
        made = ModelOutput.for_tool_call("mockllm/model", "add", {"x": 1, "y": 1})
    else:
        said = WRONG if "2 + 3" in asked.text else "It is 2."
        parts = [ContentReasoning(reasoning="one and one"), ContentText(text=said)]
        made = ModelOutput.from_content("mockllm/model", parts)
    made.usage = ModelUsage(input_tokens=20, output_tokens=7, total_tokens=30, input_tokens_cache_read=3)
    return made


def sums():
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import Score, includes, mean, scorer
    from inspect_ai.solver import generate, solver, system_message, use_tools
    from inspect_ai.tool import tool

    @tool
    def add():
        async def execute(x: int, y: int):
            """Add two numbers.

            Args:
                x: First number.
                y: Second number.
            """
            return x + y

        return execute

    @scorer(metrics={"short": [mean()], "polite": [mean()]})
    def style():
        async def score(state, target):
            return Score(
                value={"short": float(len(state.output.completion) < 20), "polite": 0.5}, explanation="by length"
            )

        return score

    @solver
    def break_on(word):
        async def solve(state, _):
            if word in state.input_text:
                raise ValueError("a <b>broken</b> sample")
            return state

        return solve

    samples = [
        Sample(input="What is 1 + 1?", target="2", id="one"),
        Sample(input="What is 2 + 3?", target="5", id="two", metadata={"level": 2}),
        Sample(input="break please", target="x", id="three"),
    ]
    return Task(
        dataset=samples, solver=[system_message("Be short."), break_on("break"), use_tools(add()), generate()],
        scorer=[includes(), style()], epochs=2, fail_on_error=False, name="sums",
    )  # fmt: skip


if __name__ == "__main__":
    import tiktoken
    from inspect_ai import eval as evaluate
    from inspect_ai.model import get_model

    tiktoken.get_encoding = tiktoken.encoding_for_model = lambda name: _Bytes()
    model = get_model("mockllm/model", custom_outputs=answer)
    for kind in ("eval", "json"):
        evaluate(sums(), model=model, log_dir=sys.argv[1], log_format=kind, display="plain", max_samples=1)
