"""Nim with one heap: two players take 1 to `max_take` sticks in turn, and who takes the last one wins.

The opponent plays perfectly, at random, or is the policy itself (`"self"`): then its moves come from the same model at
the same time, told what the model is told from its own side of the board. Its moves do not train; both seats occur as
often, so every kind of move trains in some rollout. Who moves second is told what is left after the opponent's opening.
A heap is won for who is to move unless it is a multiple of `max_take + 1`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

import mettle.envs as vf

NUMBER = re.compile(r"-?\d{1,9}")
SEATS = ("first", "second")
OPPONENTS = ("perfect", "random", "self")
SHOWN = ("perfect", "legal")
MOVES = ("take", "leave")
"""What a move says: how many sticks it takes, or how many it leaves."""


def perfect_take(heap: int, max_take: int, rng: random.Random) -> int:
    """A move that leaves a multiple of `max_take + 1`; any legal one where there is none."""
    return heap % (max_take + 1) or rng.randint(1, min(max_take, heap))


class NimEnv(vf.MultiTurnEnv):
    """Ends when the heap is empty or somebody takes what cannot be taken, which loses."""

    def __init__(self, *, max_take: int, opponent: str, shown: str, move: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_take, self.opponent, self.shown, self.move = max_take, opponent, shown, move

    async def setup_state(self, state: vf.State) -> vf.State:
        """The heap; who is second sees it after the opponent's opening."""
        state |= {"heap": int(state["info"]["heap"]), "num_moves": 0, "has_won": False, "is_legal": True}
        state["opponent_said"] = []
        if state["info"]["agent"] == SEATS[1]:
            await self._opponent_moves(state)
            if state["has_won"]:  # it took what cannot be taken, before the model was asked anything
                state["final_env_response"] = [vf.UserMessage(content="you win")]
            else:
                state["prompt"] = [vf.UserMessage(content=question(state["heap"], self.max_take, self.move))]
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """What is left after the model's move and the opponent's."""
        # What was cut off may have meant something else, and whatever followed the number would be free of charge.
        take = None if state["trajectory"][-1]["is_truncated"] else self._take_of(messages[-1], state["heap"])
        state["num_moves"] += 1
        if take is None or not 1 <= take <= min(self.max_take, state["heap"]):
            state["is_legal"] = False
            return self._end(state, "you lose")
        state["heap"] -= take
        if not state["heap"]:
            state["has_won"] = True
            return self._end(state, "you win")
        await self._opponent_moves(state)
        if state["has_won"] or not state["heap"]:
            return self._end(state, "you win" if state["has_won"] else "you lose")
        return [vf.UserMessage(content=f"{state['heap']} left")]

    def demonstrate(self, messages: vf.Messages, row: Mapping[str, Any]) -> str:
        """A perfect move, or just any legal one (`shown = "legal"`)."""
        info, said = row["info"], NUMBER.findall(str(messages[-1]["content"]))
        is_opening = len(messages) == 1 and info["agent"] == SEATS[0]
        heap = int(info["heap"] if is_opening else said[0 if len(messages) > 1 else -1])
        rng = random.Random(f"{info['seed']}/shown/{heap}")
        if self.shown == "legal":
            take = rng.randint(1, min(self.max_take, heap))
        else:
            take = perfect_take(heap, self.max_take, rng)
        return str(take if self.move == "take" else heap - take)

    def _take_of(self, message: Any, heap: int) -> int | None:
        """How many sticks a move takes; None where it says no number."""
        said = last_number(message)
        return said if said is None or self.move == "take" else heap - said

    async def _opponent_moves(self, state: vf.State) -> None:
        heap = state["heap"]
        rng = random.Random(f"{state['info']['seed']}/{heap}")
        if self.opponent == "self":
            take = await self._own_move(state)
        elif self.opponent == "random":
            take = rng.randint(1, min(self.max_take, heap))
        else:
            take = perfect_take(heap, self.max_take, rng)
        if take is None or not 1 <= take <= min(self.max_take, heap):
            state["has_won"] = True
        else:
            state["heap"] -= take

    async def _own_move(self, state: vf.State) -> int | None:
        """What the policy takes from where the opponent sits."""
        said = state["opponent_said"]
        left = f"{state['heap']} left"  # mettle: allow[judge-raw-output] its own count
        text = left if said else question(state["heap"], self.max_take, self.move)
        said.append(vf.UserMessage(content=text))
        # Its own conversation, not the rollout's: that one's tokens are of the other side of the board.
        response = await state["client"].get_response(
            prompt=list(said),
            model=state["model"],
            sampling_args=state["sampling_args"],
            tools=None,
            state={"input": state["input"], "trajectory": []},
        )
        said.append(response.message.to_assistant())
        return None if response.message.is_truncated else self._take_of(said[-1], state["heap"])

    def _end(self, state: vf.State, text: str) -> vf.Messages:
        state["final_env_response"] = [vf.UserMessage(content=text)]
        return state["final_env_response"]


def question(heap: int, max_take: int, move: str) -> str:
    """The rules, and what is left."""
    said = ", say what you leave" if move == "leave" else ""
    return f"nim: take 1 to {max_take}{said}, who takes the last wins. {heap} left"


def last_number(message: Any) -> int | None:
    """The last number in a message."""
    numbers = NUMBER.findall(vf.Parser().parse_answer([message]) or "")
    return int(numbers[-1]) if numbers else None


def won(state: vf.State) -> float:
    """1 for the player who took the last stick, or whose opponent took what cannot be taken."""
    return float(state["has_won"])


def is_legal(state: vf.State) -> float:
    """1 when every move could be made."""
    return float(state["is_legal"])


def num_moves(state: vf.State) -> float:
    """How often the model moved."""
    return float(state["num_moves"])


def make_rows(
    num_rows: int, *, seed: str, low: int, high: int, max_take: int, opponent: str, move: str
) -> list[dict[str, Any]]:
    """Heaps; against a perfect player only those that can be won, so that the reward says how well they are played."""
    rng = random.Random(seed)
    heaps = [heap for heap in range(low, high + 1) if opponent != "perfect" or heap % (max_take + 1)]
    rows = []
    for _ in range(num_rows):
        heap = rng.choice(heaps)
        agent = SEATS[rng.randrange(2)] if opponent == "self" else SEATS[0]
        info = {"heap": heap, "agent": agent, "position": f"{agent} of {heap}", "seed": rng.randrange(2**32)}
        rows.append({"question": question(heap, max_take, move), "info": info})
    return rows


def load_environment(
    opponent: str = "perfect",
    low: int = 5,
    high: int = 12,
    max_take: int = 3,
    shown: str = "perfect",
    move: str = "take",
    num_train: int = 1000,
    num_eval: int = 200,
    seed: int = 0,
) -> vf.MultiTurnEnv:
    """Heaps of `low` to `high` sticks against "perfect", "random" or "self"; shown are "perfect" or "legal" moves, and
    a move says how many sticks to "take" or to "leave"."""
    choices = (("opponent", opponent, OPPONENTS), ("shown", shown, SHOWN), ("move", move, MOVES))
    for name, value, allowed in choices:
        if value not in allowed:
            raise ValueError(f"{name} is one of {', '.join(allowed)}, not {value!r}")
    if not 1 <= max_take < low <= high:
        raise ValueError(f"max_take is at least 1 and below low, and low at most high; got {max_take}, {low}, {high}")
    game: dict[str, Any] = {"low": low, "high": high, "max_take": max_take, "opponent": opponent, "move": move}
    return NimEnv(
        max_take=max_take,
        opponent=opponent,
        shown=shown,
        move=move,
        dataset=lambda: make_rows(num_train, seed=f"{seed}/train", **game),
        eval_dataset=lambda: make_rows(num_eval, seed=f"{seed}/eval", **game),
        rubric=vf.Rubric([won, is_legal, num_moves], weights=[1.0, 0.0, 0.0]),
        max_turns=high,
    )
