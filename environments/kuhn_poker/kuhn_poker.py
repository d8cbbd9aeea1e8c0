"""Kuhn poker: three cards, one chip in the pot from each, one bet. Small enough to be solved, too large to guess.

The first player checks or bets. After a bet the other folds or calls; after a check the other checks or bets, and then
the first folds or calls. The higher card takes the pot. A row is a match of some hands against an opponent whose every
choice is decided by the row, so the rollouts of one group meet the same cards and the same opponent.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mettle.envs as vf

CARDS = "JQK"
MAX_LOSS = 2
"""Chips that a hand can cost: the ante and one bet."""
ALPHA = 1 / 3
"""Which of the equilibria is played by the first player: any share from 0 to 1/3."""
WORD = re.compile(r"\b(check|bet|call|fold)\b", re.IGNORECASE)
ENDED = {"pp": 1, "pbp": 1, "pbb": 2, "bp": 1, "bb": 2}
"""Finished hands (p: check or fold, b: bet or call) and the chips that change hands."""
FOLDED_BY = {"pbp": 0, "bp": 1}

Strategy = Callable[[str, str], float]
"""The chance of betting or calling, by the own card and what was done in the hand."""


def equilibrium(card: str, history: str) -> float:
    """A strategy that loses to nobody: against it, no player does better than the value of the game."""
    match history, card:
        case ("", "J"):
            return ALPHA
        case ("", "K"):
            return 3 * ALPHA
        case ("pb", "Q"):
            return ALPHA + 1 / 3
        case ("p", "J") | ("b", "Q"):
            return 1 / 3
        case (("pb" | "p" | "b"), "K"):
            return 1.0
    return 0.0


OPPONENTS: dict[str, Strategy] = {
    "nash": equilibrium,
    "random": lambda card, history: 0.5,
    "always_bet": lambda card, history: 1.0,
    "always_pass": lambda card, history: 0.0,
    "honest": lambda card, history: float(card == "K" or (card == "Q" and history == "pb")),
}


def first_wins(cards: str, history: str) -> float:
    """Chips that the first player wins in a finished hand; `cards` are the first's and the second's."""
    amount = ENDED[history]
    if history in FOLDED_BY:
        return float(-amount if FOLDED_BY[history] == 0 else amount)
    return float(amount if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -amount)


def value(first: Strategy, second: Strategy) -> float:
    """Chips that the first player wins in a hand, on average over deals and choices."""

    def at(cards: str, history: str) -> float:
        if history in ENDED:
            return first_wins(cards, history)
        turn = len(history) % 2
        chance = (first, second)[turn](cards[turn], history)
        return chance * at(cards, history + "b") + (1 - chance) * at(cards, history + "p")

    deals = [a + b for a in CARDS for b in CARDS if a != b]
    return sum(at(cards, "") for cards in deals) / len(deals)


@dataclass
class Match:
    """The hands of a row, as far as they have been played. `chips` are the model's."""

    info: Mapping[str, Any]
    chips: float = 0.0
    num_illegal: int = 0
    number: int = 0
    history: str = ""
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._go_on()

    @property
    def is_over(self) -> bool:
        """Whether all hands have been played."""
        return self.number >= len(self.info["hands"])

    @property
    def card(self) -> str:
        """The model's card."""
        return str(self.info["hands"][self.number]["card"])

    @property
    def seat(self) -> int:
        """0 when the model is the first player of the hand, else 1."""
        return int(self.info["hands"][self.number]["seat"])

    @property
    def allowed(self) -> tuple[str, str]:
        """The words for passing and for betting."""
        return ("fold", "call") if self.history.endswith("b") else ("check", "bet")

    def act(self, word: str | None) -> None:
        """The model's choice, and what follows until it is asked again. What is not allowed forfeits the hand."""
        if word not in self.allowed:
            self.num_illegal += 1
            self._end(-MAX_LOSS, f"{' or '.join(self.allowed)} was asked for")
        else:
            self.history += "pb"[self.allowed.index(word)]
        self._go_on()

    def take_text(self) -> str:
        """What was said since the last time."""
        text, self.said = ". ".join(self.said), []
        return text

    def _go_on(self) -> None:
        while not self.is_over:
            if self.history in ENDED:
                won = first_wins(self._cards(), self.history) * (1 if self.seat == 0 else -1)
                self._end(won, f"the opponent has {self._opponent_card}")
                continue
            if not self.history:
                self.said.append(f"you have {self.card} and are {('first', 'second')[self.seat]}")
            if len(self.history) % 2 == self.seat:
                self.said.append(" or ".join(self.allowed))
                return
            self._opponent_acts()

    def _opponent_acts(self) -> None:
        chance = OPPONENTS[self.info["opponent"]](self._opponent_card, self.history)
        drawn = random.Random(f"{self.info['seed']}/{self.number}/{self.history}").random()
        bets = drawn < chance
        self.said.append(f"the opponent says {self.allowed[bets]}")
        self.history += "pb"[bets]

    def _end(self, won: float, why: str) -> None:
        self.chips += won
        self.said.append(f"{why}: you {'win' if won > 0 else 'lose'} {abs(won):.0f}")
        self.number += 1
        self.history = ""

    @property
    def _opponent_card(self) -> str:
        return str(self.info["hands"][self.number]["opponent_card"])

    def _cards(self) -> str:
        return self.card + self._opponent_card if self.seat == 0 else self._opponent_card + self.card


class KuhnPokerEnv(vf.MultiTurnEnv):
    """Ends when all hands have been played."""

    async def setup_state(self, state: vf.State) -> vf.State:
        """Deal."""
        state["match"] = Match(state["info"])
        state["match"].take_text()
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """What the model's choice led to."""
        match: Match = state["match"]
        match.act(read_word(messages[-1]))
        answer = [vf.UserMessage(content=match.take_text())]
        if match.is_over:
            state["final_env_response"] = answer
        return answer

    def demonstrate(self, messages: vf.Messages, row: Mapping[str, Any]) -> str:
        """The equilibrium's choice; the row decides where it is a matter of chance."""
        match = Match(row["info"])
        for message in messages:
            if message["role"] == "assistant":
                match.act(read_word(message))
        chance = equilibrium(match.card, match.history)
        drawn = random.Random(f"shown/{row['info']['seed']}/{match.number}/{match.history}").random()
        return match.allowed[drawn < chance]


def read_word(message: Any) -> str | None:
    """The last of the four words in a message."""
    words = WORD.findall(vf.Parser().parse_answer([message]) or "")
    return words[-1].lower() if words else None


def chips(state: vf.State, info: Any) -> float:
    """Chips won, as a share of the most that can be won or lost: from -1 to 1."""
    return state["match"].chips / (MAX_LOSS * len(info["hands"]))


def num_illegal(state: vf.State) -> float:
    """How many hands were forfeited by a word that was not asked for."""
    return float(state["match"].num_illegal)


RULES = (
    "kuhn poker: cards J Q K, K is highest, one each. both put in 1. the first says check or bet. "
    "to a bet the other says fold or call. a bet or call costs 1"
)


def make_rows(num_rows: int, *, seed: str, num_hands: int, opponent: str) -> list[dict[str, Any]]:
    """Matches, the seat of the first hand drawn and then taken in turn."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        seat = rng.randrange(2)
        hands = []
        for number in range(num_hands):
            card, opponent_card = rng.sample(CARDS, 2)
            hands.append({"card": card, "opponent_card": opponent_card, "seat": (seat + number) % 2})
        info = {"seed": rng.randrange(2**32), "opponent": opponent, "hands": hands}
        rows.append({"question": f"{RULES}. {Match(info).take_text()}", "info": info})
    return rows


def load_environment(
    opponent: str = "nash", num_hands: int = 3, num_train: int = 1000, num_eval: int = 200, seed: int = 0
) -> vf.MultiTurnEnv:
    """Matches of `num_hands` hands against "nash", "random", "always_bet", "always_pass" or "honest"."""
    if opponent not in OPPONENTS:
        raise ValueError(f"opponent is one of {', '.join(OPPONENTS)}, not {opponent!r}")
    if num_hands < 1:
        raise ValueError(f"num_hands is at least 1, not {num_hands}")
    match = {"num_hands": num_hands, "opponent": opponent}
    return KuhnPokerEnv(
        dataset=lambda: make_rows(num_train, seed=f"{seed}/train", **match),
        eval_dataset=lambda: make_rows(num_eval, seed=f"{seed}/eval", **match),
        rubric=vf.Rubric([chips, num_illegal], weights=[1.0, 0.0]),
    )
