"""The prompt, the parser and the reward that suit each answer format, as the code that an environment needs.

Parts: `RewardRecipe`, `recipe_for`. The code of a recipe is Python that stands by itself below `import mettle.envs as
vf`. Invariant: what it rewards is one whole answer in a marked place, so that no recipe breaks a rule of the lint.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mettle.quality.data.exact_recipes import EXACT, exact_functions
from mettle.quality.data.formats import AnswerFormat

_NUMBER = '''def as_number(text: str) -> Decimal | None:
    """The number that the text is, whatever its separators and unit signs."""
    try:
        number = Decimal(text.strip().strip("$%").replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def correct(completion: Any, answer: str, parser: Any) -> float:
    """1 when the number given is the right one; what is no number is compared as text."""
    said, wanted = parser.parse_answer(completion) or "", as_number(answer)
    if wanted is None:
        return float(bool(said) and " ".join(said.split()) == " ".join(answer.split()))
    return float(as_number(said) == wanted)
'''
_BOXED = '''def as_number(text: str) -> Decimal | None:
    """The number that the text is, if it is one."""
    try:
        number = Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def correct(completion: Any, answer: str, parser: Any) -> float:
    """1 when the box holds the right result: the same number, or the same expression but for space."""
    given = parser.parse_answer(completion) or ""
    number = as_number(given)
    if number is not None:
        return float(number == as_number(answer))
    return float(bool(given) and "".join(given.split()) == "".join(answer.split()))
'''
_JSON = '''def as_json(text: str) -> Any:
    """The value that the text is; None when it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def correct(completion: Any, answer: str, parser: Any) -> float:
    """1 when the JSON given has the right value, whatever its order and space."""
    given = as_json(parser.parse_answer(completion) or "")
    return float(given is not None and given == as_json(answer))
'''
_FREE = '''def words(text: str) -> list[str]:
    """The words of a text, without case and punctuation."""
    return re.findall(r"\\w+", text.casefold())


def correct(completion: Any, answer: str, parser: Any) -> float:
    """1 when the words are those of the reference, in its order. A judge that reads understands more."""
    given = words(parser.parse_answer(completion) or "")
    return float(bool(given) and given == words(answer))


def overlap(completion: Any, answer: str, parser: Any) -> float:
    """Words shared with the reference (F1): a hint on the way. Nothing for a short one, where it would pay a miss."""
    given, wanted = words(parser.parse_answer(completion) or ""), words(answer)
    if len(wanted) < 5:
        return float(bool(given) and given == wanted)
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0
'''
_HASH = '''def after_hashes(text: str) -> str:
    """What follows the last `####`."""
    return text.rpartition("####")[2].strip() if "####" in text else ""
'''
_BOX = '''def in_last_box(text: str) -> str:
    """The inside of the last \\\\boxed{}."""
    return vf.extract_boxed_answer(text, strict=True).strip()
'''
_FORMAT = '''def answer_format(completion: Any, parser: Any) -> float:
    """1 when there is an answer where it is looked for."""
    return float(bool(parser.parse_answer(completion)))
'''
_TAGS = "Think it over, then give {what} inside <answer> tags, as in <answer>{example}</answer>."
_RUBRIC = "vf.Rubric(funcs=[correct, answer_format], weights=[1.0, 0.1], parser=parser)"
_FREE_RUBRIC = "vf.Rubric(funcs=[correct, overlap, answer_format], weights=[0.7, 0.3, 0.1], parser=parser)"


@dataclass(frozen=True, slots=True)
class RewardRecipe:
    """`parser` and `rubric` are expressions, `functions` the code that they need, `imports` its lines of import.

    `demonstration` is an expression of `row["answer"]`: a right answer, whole. `pass_on`: what says that an answer is
    right, where that is not all of the reward but its format.
    """

    format: str
    system_prompt: str
    parser: str
    rubric: str
    functions: str
    imports: tuple[str, ...]
    demonstration: str
    reward: str
    pass_on: str | None = None

    def code(self) -> str:
        """Everything but the data, to be read by a person."""
        setup = f"parser = {self.parser}\nrubric = {self.rubric}\n"
        imports = "\n".join([*self.imports, "from typing import Any", "", "import mettle.envs as vf"])
        return f"{imports}\n\nSYSTEM_PROMPT = {self.system_prompt!r}\n\n\n{self.functions}\n\n{setup}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON wants it."""
        return {**asdict(self), "code": self.code()}


def recipe_for(answer_format: AnswerFormat) -> RewardRecipe:
    """The recipe of a format."""
    if answer_format.name == "code":
        return _code_recipe()
    if answer_format.name in ("gsm8k", "boxed"):
        return _marked_recipe(answer_format.name)
    return _tagged_recipe(answer_format)


def _marked_recipe(name: str) -> RewardRecipe:
    is_hash = name == "gsm8k"
    extract, function = ("after_hashes", _HASH) if is_hash else ("in_last_box", _BOX)
    prompt = (
        "Think step by step. End with a line `#### ` followed by the result, a number alone."
        if is_hash
        else "Think step by step, then give the result inside \\boxed{}."
    )
    shown = "f\"#### {row['answer']}\"" if is_hash else "f\"\\\\boxed{{{row['answer']}}}\""
    return RewardRecipe(
        format=name,
        system_prompt=prompt,
        parser=f"vf.MaybeThinkParser(extract_fn={extract})",
        rubric=_RUBRIC,
        functions="\n\n".join([function, _NUMBER if is_hash else _BOXED, _FORMAT]),
        imports=("from decimal import Decimal, InvalidOperation",),
        demonstration=shown,
        reward="1 when the number after `####` is the right one"
        if is_hash
        else "1 when the box holds the right result",
    )


def _tagged_recipe(answer_format: AnswerFormat) -> RewardRecipe:
    name, labels = answer_format.name, answer_format.labels
    if name in EXACT:
        exact = EXACT[name]
        what, example = exact.what, exact.example
        functions, imports = exact_functions(name, has_case=answer_format.has_case)
        if labels and name in ("boolean", "label"):
            what = f"exactly one of {', '.join(labels)}" if name == "label" else f"{' or '.join(labels[:2])}, alone,"
            example = labels[0]
        reward = "1 when the answer is the right one, case included" if answer_format.has_case else exact.reward
    else:
        asked = {
            "numeric": ("the number alone", "42", _NUMBER, ("from decimal import Decimal, InvalidOperation",)),
            "json": ("the JSON alone", '{"key": "value"}', _JSON, ("import json",)),
            "free-text": ("your answer", "...", _FREE, ("import re", "from collections import Counter")),
        }
        what, example, functions, imports = asked[name]
        reward = {
            "free-text": "1 when the words are those of the reference",
            "json": "1 when the JSON has the right value",
            "numeric": "1 when the number is the right one",
        }[name]
    is_free = name == "free-text"
    return RewardRecipe(
        format=name,
        system_prompt=_TAGS.format(what=what, example=example),
        parser='vf.XMLParser(["answer"])',
        rubric=_FREE_RUBRIC if is_free else _RUBRIC,
        functions="\n\n".join([functions, _FORMAT]),
        imports=tuple(imports),
        demonstration="f\"<answer>{row['answer']}</answer>\"",
        reward=reward,
        pass_on="correct" if is_free else None,
    )


def _code_recipe() -> RewardRecipe:
    return RewardRecipe(
        format="code",
        system_prompt="Solve the task in Python. Give the whole program in one fenced block: ```python ... ```",
        parser="vf.CodeParser()",
        rubric="vf.CodeRubric(parser=parser)",
        functions="",
        imports=(),
        demonstration="f\"```python\\n{row['answer']}\\n```\"",
        reward="1 when the code passes every test, in the sandbox",
    )
