"""Who is whose friend: a table that only a tool can read, small enough for a policy made from nothing.

Each question has a table of its own, so nothing can be known by heart: `friend of friend of bo` takes two calls, the
second with the name that the first one found, and then the last name alone. A guess is right once in twenty-three.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from typing import Any

import mettle.envs as vf

SYLLABLES = [first + second for first in "bdklmt" for second in "aeio"]
NUM_NAMES = 24
"""Names in a table."""
MAX_HOPS, MAX_SYLLABLES = 4, 3
SHOWN = ("right", "any")
LISTINGS = ("full", "brief")
BRIEF = vf.Tool(name="ask", description="", parameters={"type": "object", "properties": {"who": {"type": "string"}}})
"""The tool without what tells it from others: every token between a name and its copy makes copying harder to learn."""


def ask(who: str, friends: dict[str, str]) -> str:
    """The name of a friend."""
    return friends.get(who) or f"nobody is called {who}"


class LookupEnv(vf.StatefulToolEnv):
    """Each rollout's calls read the table of its own question."""

    def __init__(self, *, shown: str, max_hops: int, num_syllables: int, listing: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shown, self.max_hops, self.names = shown, max_hops, all_names(num_syllables)
        self.add_tool(ask, args_to_skip=["friends"])
        if listing == "brief":
            self.tool_defs = [BRIEF]

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: vf.Messages, state: vf.State, **kwargs: Any
    ) -> dict[str, Any]:
        """The table beside what the model gave."""
        return {**tool_args, "friends": state["info"]["friends"]}

    def demonstrate(self, messages: vf.Messages, row: Mapping[str, Any]) -> Any:
        """As many calls as the question takes, or a number of them that has nothing to do with it (`shown = "any"`):
        without any, a name is guessed."""
        info, rng = row["info"], random.Random(row["info"]["seed"])
        found = [message["content"] for message in messages if message["role"] == "tool"]
        hops = info["hops"] if self.shown == "right" else rng.randint(0, self.max_hops)
        if len(found) == hops:
            return found[-1] if found else rng.choice(self.names)
        who = found[-1] if found else info["who"]
        call = vf.ToolCall(id=f"call_{len(found)}", name="ask", arguments=json.dumps({"who": who}))
        return vf.AssistantMessage(content="", tool_calls=[call])


def correct(completion: Any, answer: str, parser: Any) -> float:
    """1 when the last message is the name that was asked for, and nothing else."""
    return float((parser.parse_answer(completion[-1:]) or "").strip() == answer)


def num_answered(completion: Any) -> int:
    """Calls that the tool answered."""
    return sum(message["role"] == "tool" for message in completion)


def is_unaided(completion: Any) -> float:
    """1 when the tool was never called."""
    return float(num_answered(completion) == 0)


def is_unearned(completion: Any, answer: str, parser: Any, info: Any) -> float:
    """1 when the answer is right after fewer calls than the question takes: luck, which earns all the same."""
    return float(num_answered(completion) < info["hops"]) * correct(completion, answer, parser)


def all_names(num_syllables: int) -> list[str]:
    """Every name of so many syllables."""
    return ["".join(syllables) for syllables in itertools.product(SYLLABLES, repeat=num_syllables)]


def make_rows(num_rows: int, *, seed: str, max_hops: int, num_syllables: int) -> list[dict[str, Any]]:
    """Questions, each with a table in which one leads to all others before the first comes again."""
    rng, names = random.Random(seed), all_names(num_syllables)
    rows = []
    for _ in range(num_rows):
        ring = rng.sample(names, NUM_NAMES)
        hops = rng.randint(1, max_hops)
        info = {
            "who": ring[0],
            "hops": hops,
            "friends": dict(zip(ring, [*ring[1:], ring[0]], strict=True)),
            "seed": rng.randrange(2**32),
        }
        rows.append({"question": "friend of " * hops + ring[0], "answer": ring[hops], "info": info})
    return rows


def load_environment(
    max_hops: int = 2,
    shown: str = "right",
    num_syllables: int = 1,
    listing: str = "full",
    num_train: int = 5000,
    num_eval: int = 200,
    seed: int = 0,
) -> vf.ToolEnv:
    """Questions of 1 to `max_hops` friends; demonstrated are as many calls as it takes ("right") or "any" number."""
    for name, given, allowed in (("shown", shown, SHOWN), ("listing", listing, LISTINGS)):
        if given not in allowed:
            raise ValueError(f"{name} is one of {', '.join(allowed)}, not {given!r}")
    for name, value, most in (("max_hops", max_hops, MAX_HOPS), ("num_syllables", num_syllables, MAX_SYLLABLES)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} is 1 to {most}, not {value}")
    made: dict[str, Any] = {"max_hops": max_hops, "num_syllables": num_syllables}
    return LookupEnv(
        shown=shown,
        listing=listing,
        **made,
        dataset=lambda: make_rows(num_train, seed=f"{seed}/train", **made),
        eval_dataset=lambda: make_rows(num_eval, seed=f"{seed}/eval", **made),
        rubric=vf.Rubric(funcs=[correct, is_unaided, is_unearned], weights=[1.0, 0.0, 0.0], parser=vf.Parser()),
        max_turns=max_hops + 2,
    )
