"""A sound environment: one marked answer, compared whole; errors rise; nothing is kept between rollouts."""

from __future__ import annotations

import ast
import json
import re

import mettle.envs as vf

NUMBER = re.compile(r"-?\d+")
MARKED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
CASES = [(a, b) for a in range(3, 9) for b in range(5, 10)]
ROWS = [{"question": f"What is {a} times {b}?", "answer": str(a * b), "info": {"factors": [a, b]}} for a, b in CASES]


def marked(text: str) -> str:
    """The last marked answer; a pattern that is bound to a mark may take a match of many."""
    found = MARKED.findall(text)
    return found[-1].strip() if found else ""


def correct(completion, answer, parser) -> float:
    """1 when the number given is the right one."""
    given = parser.parse_answer(completion) or ""
    try:
        return float(ast.literal_eval(given) == int(answer))
    except (ValueError, SyntaxError):
        return 0.0


def is_number(completion, parser) -> float:
    """1 when a number was given."""
    return float(NUMBER.fullmatch(parser.parse_answer(completion) or "") is not None)


def shows_factors(completion, info, parser) -> float:
    """A metric may look for anything: it is of weight 0, and what it looks for is not the answer."""
    text = json.dumps(completion[-1]["content"]) if completion else ""
    return float(all(str(factor) in text for factor in info["factors"]))


def load_environment(num_examples: int = -1) -> vf.SingleTurnEnv:
    rows = ROWS if num_examples < 0 else ROWS[:num_examples]
    parser = vf.Parser(extract_fn=marked)
    rubric = vf.Rubric(funcs=[correct, is_number, shows_factors], weights=[1.0, 0.1, 0.0], parser=parser)
    prompt = "Give the number inside <answer> tags."
    return vf.SingleTurnEnv(dataset=rows, system_prompt=prompt, parser=parser, rubric=rubric)
