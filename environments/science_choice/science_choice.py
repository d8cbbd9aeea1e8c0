"""Multiple-choice science, answered with one letter in a box.

The questions made here come from `science_facts`: each fact asked in two directions, with wrong choices of the same
family, and from formulas with numbers drawn for each question, whose wrong choices are the usual slips. Public datasets
are taken instead when asked for by name. Which letter is right is drawn per question, so no letter is worth guessing.
A fact belongs to one split, in both directions, so that the evaluation never asks a trained fact backwards.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from typing import Any

import science_facts

import mettle.envs as vf

LETTERS = "ABCDEFGHIJ"
SYSTEM_PROMPT = "Think it over, then give the letter of the right choice, alone, inside \\boxed{}."
LETTER = re.compile(r"(?:\\text\{)?\(?([A-J])\)?[.:]?\}?")
EVAL_SHARE = 5
"""One fact in so many is for evaluation."""
PUBLIC = {
    "arc": ("allenai/ai2_arc", "ARC-Challenge"),
    "sciq": ("allenai/sciq", None),
}


def in_eval(key: str) -> bool:
    """Whether what the key names belongs to the evaluation split."""
    return zlib.crc32(key.encode()) % EVAL_SHARE == 0


def ask(question: str, right: str, wrong: list[str], rng: random.Random, **info: Any) -> dict[str, Any]:
    """A row: the question with its choices in a drawn order, and the letter of the right one."""
    choices = [right, *wrong]
    rng.shuffle(choices)
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    info = {**info, "choices": choices}
    return {"question": "\n".join([question, *lines]), "answer": LETTERS[choices.index(right)], "info": info}


def fact_rows(*, for_eval: bool, num_choices: int, subjects: set[str], rng: random.Random) -> Iterator[dict[str, Any]]:
    """Every fact of the split, in both directions."""
    for family in science_facts.FAMILIES:
        if family.subject not in subjects:
            continue
        for left, right in family.pairs:
            if in_eval(f"{family.name}/{left}") != for_eval:
                continue
            about = {"subject": family.subject, "family": family.name}
            lefts = sorted({pair[0] for pair in family.pairs if pair[1] != right})
            rights = sorted({pair[1] for pair in family.pairs if pair[1] != right})
            num_wrong = min(num_choices - 1, len(lefts), len(rights))
            yield ask(family.forward.format(left), right, rng.sample(rights, num_wrong), rng, **about)
            yield ask(family.backward.format(right), left, rng.sample(lefts, num_wrong), rng, **about)


def number(value: float) -> str:
    """A value as it is written in a choice."""
    return f"{value:.4g}"


def formula_question(rng: random.Random) -> tuple[str, float, list[float], str]:
    """A question with numbers, its value, the values of the usual slips, and the unit."""
    a, b, c = rng.randint(2, 40), rng.randint(2, 40), rng.randint(2, 12)
    asked: list[tuple[str, float, list[float], str]] = [
        (
            f"A body of {a} kg is accelerated at {b} m/s^2. What net force acts on it?",
            a * b,
            [a / b, b / a, a + b],
            "N",
        ),
        (
            f"A car covers {a * b} m in {b} s at constant speed. How fast is it?",
            a,
            [a * b * b, a * b + b, b / a],
            "m/s",
        ),
        (f"What is the kinetic energy of {a} kg at {b} m/s?", a * b**2 / 2, [a * b**2, a * b / 2, a * b], "J"),
        (f"A current of {a} A flows through {b} ohm. What is the voltage?", a * b, [a / b, b / a, a + b], "V"),
        (f"What power does {b} ohm take up at {a} A?", a**2 * b, [a * b, a * b**2, a**2 / b], "W"),
        (f"What is the density of {a * c} kg in {c} m^3?", a, [a * c * c, 1 / a, a * c - c], "kg/m^3"),
        (f"A force of {a} N acts on {c} m^2. What is the pressure?", a / c, [a * c, c / a, a + c], "Pa"),
        (f"A wave of {a} Hz has a wavelength of {c} m. How fast does it travel?", a * c, [a / c, c / a, a + c], "m/s"),
        (f"How much charge do {a} A carry in {b} s?", a * b, [a / b, b / a, a + b], "C"),
        (f"How many grams are {c} mol of water (18 g/mol)?", 18 * c, [18 / c, c / 18, 18 + c], "g"),
        (
            f"Two resistors of {a} ohm each are connected in parallel. What is the total?",
            a / 2,
            [2 * a, a, a**2],
            "ohm",
        ),
        (f"A sample has a half-life of {c} h. What percentage is left after {3 * c} h?", 12.5, [25, 33.33, 6.25], "%"),
        (f"What is the momentum of {a} kg at {b} m/s?", a * b, [a / b, a * b**2 / 2, a + b], "kg m/s"),
        (f"What work does {a} N do along {b} m in its own direction?", a * b, [a / b, b / a, a + b], "J"),
    ]
    return rng.choice(asked)


def formula_rows(*, for_eval: bool, num_choices: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Questions with numbers, without end."""
    while True:
        question, value, slips, unit = formula_question(rng)
        if in_eval(question) != for_eval:
            continue
        right = f"{number(value)} {unit}"
        others = [*slips, value * 10, value / 10, value * 2, value / 2, value * 4, value * 100, value * 3, value / 3]
        wrong = list(dict.fromkeys(text for x in others if (text := f"{number(x)} {unit}") != right))
        yield ask(question, right, wrong[: num_choices - 1], rng, subject="physics", family="formulas with numbers")


def make_rows(
    num_rows: int, *, for_eval: bool, num_choices: int, subjects: set[str], seed: int
) -> list[dict[str, Any]]:
    """Different questions of one split: every fact once, in either direction, then formulas with numbers."""
    rng = random.Random(f"{seed}/{for_eval}/{num_choices}")
    facts = list(fact_rows(for_eval=for_eval, num_choices=num_choices, subjects=subjects, rng=rng))
    rng.shuffle(facts)
    rows = {row["question"].splitlines()[0]: row for row in facts[:num_rows]}
    if "physics" in subjects:
        numbers = formula_rows(for_eval=for_eval, num_choices=num_choices, rng=rng)
        for row, _ in zip(numbers, range(50 * num_rows), strict=False):
            if len(rows) >= num_rows:
                break
            rows.setdefault(row["question"].splitlines()[0], row)
    made = list(rows.values())
    rng.shuffle(made)
    return made


def public_rows(source: str, split: str, num_rows: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a public dataset: arc (ARC Challenge) or sciq."""
    from datasets import load_dataset

    name, config = PUBLIC[source]
    rng = random.Random(seed)
    rows = []
    for row in load_dataset(name, config, split=split).shuffle(seed=seed).select(range(num_rows)):
        if source == "arc":
            texts = row["choices"]["text"]
            right = texts[row["choices"]["label"].index(row["answerKey"])]
            rows.append(ask(row["question"], right, [text for text in texts if text != right], rng, source=source))
        else:
            wrong = [row["distractor1"], row["distractor2"], row["distractor3"]]
            rows.append(ask(row["question"], row["correct_answer"], wrong, rng, source=source))
    return rows


def given_letter(text: str) -> str:
    """The letter inside the last box, if the box holds a letter and nothing else."""
    boxed = vf.extract_boxed_answer(text, strict=True).strip()
    found = LETTER.fullmatch(boxed)
    return found.group(1) if found else ""


def correct(completion: Any, answer: str, parser: Any) -> float:
    """1 when the letter of the right choice was given."""
    return float(parser.parse_answer(completion) == answer)


def format_is_one_letter(completion: Any, info: Any, parser: Any) -> float:
    """1 when one letter of the choices, and nothing else, was in the box."""
    letter = parser.parse_answer(completion)
    return float(bool(letter) and LETTERS.index(letter) < len(info["choices"]))


def load_environment(
    source: str = "made",
    subjects: list[str] | None = None,
    num_choices: int = 4,
    num_train: int = 1000,
    num_eval: int = 100,
    seed: int = 0,
) -> vf.SingleTurnEnv:
    """Questions made here (`source="made"`, offline), or of a public dataset (`"arc"`, `"sciq"`)."""
    known = {family.subject for family in science_facts.FAMILIES}
    chosen = set(subjects or known)
    if chosen - known:
        raise ValueError(f"subjects are some of {sorted(known)}, not {sorted(chosen - known)}")
    if source != "made" and source not in PUBLIC:
        raise ValueError(f"source is one of {['made', *PUBLIC]}, not {source!r}")
    if not 2 <= num_choices <= len(LETTERS):
        raise ValueError(f"num_choices is from 2 to {len(LETTERS)}, not {num_choices}")
    made = {"num_choices": num_choices, "subjects": chosen, "seed": seed}

    def train() -> list[dict[str, Any]]:
        if source != "made":
            return public_rows(source, "train", num_train, seed)
        return make_rows(num_train, for_eval=False, **made)

    def evaluation() -> list[dict[str, Any]]:
        if source != "made":
            return public_rows(source, "test", num_eval, seed)
        return make_rows(num_eval, for_eval=True, **made)

    parser = vf.MaybeThinkParser(extract_fn=given_letter)
    rubric = vf.Rubric(funcs=[correct, format_is_one_letter], weights=[1.0, 0.0], parser=parser)
    return vf.SingleTurnEnv(
        dataset=train,
        eval_dataset=evaluation,
        system_prompt=SYSTEM_PROMPT,
        parser=parser,
        rubric=rubric,
        demonstrate=lambda messages, row: f"\\boxed{{{row['answer']}}}",
    )
