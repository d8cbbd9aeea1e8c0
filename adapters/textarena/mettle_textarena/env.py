"""Text games of TextArena, alone or against opponents.

Parts: `TextArenaEnv`. Invariants: constructing one loads nothing; rows of one seed are the same games; each rollout has
a match of its own; a reward that only an opponent's invalid move brought is an error.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from mettle.envs.decorators import cleanup
from mettle.envs.episode_calls import EpisodeCalls, Pace
from mettle.envs.episodes import EpisodeEnv, EpisodicSumRubric, split_seeds
from mettle.envs.guests import guest
from mettle.envs.parsers.parser import Parser
from mettle.envs.parsers.xml_parser import XMLParser
from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.state import State
from mettle.errors import EnvironmentFault, UserError
from mettle.records.messages import Messages, UserMessage, message_from
from mettle_textarena.games import Game, Match

MAX_OPPONENT_MOVES = 1000
MAX_REMEMBERED = 4096
BRACKETED = re.compile(r"\[[^\[\]\n]{1,60}\]")
SPEAKER = re.compile(r"\[(game|player)\b", re.IGNORECASE)
Opponent = Callable[[str], Any]


def _unchanged(text: str) -> str:
    return text


class TextArenaEnv(EpisodeEnv):
    """Matches of `game`, of which the model is player `player_id`.

    The row's answer is the secret word of games that have one, else the seed. `opponent` answers for everybody else:
    "random" takes one of the moves in brackets that it was last shown; a function of the observation returns the move
    (and may be async). `feedback_fn` makes the model's message of an observation; TextArena's observations repeat the
    whole game, unless `new_only`. The default reward is the game's own.
    """

    def __init__(
        self,
        game: str = "Wordle-v0",
        num_train_examples: int = 1000,
        num_eval_examples: int = 0,
        system_prompt: str | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        feedback_fn: Callable[[str], str] = _unchanged,
        seed: int = 0,
        num_players: int = 1,
        player_id: int = 0,
        opponent: str | Opponent = "random",
        new_only: bool = False,
        game_options: Mapping[str, Any] | None = None,
        download_timeout_s: float = 20.0,
        step_timeout_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        if not 0 <= player_id < num_players:
            raise UserError(f"player_id is from 0 to {num_players - 1} of {num_players} players, not {player_id}")
        if opponent != "random" and not callable(opponent):
            raise UserError(f"opponent is 'random' or a function of the observation, not {opponent!r}")
        self.game = game
        self.num_train_examples = num_train_examples
        self.num_eval_examples = num_eval_examples
        self.seed = seed
        self.num_players = num_players
        self.player_id = player_id
        self.opponent = opponent
        self.feedback_fn = feedback_fn
        self.new_only = new_only
        self.step_timeout_s = step_timeout_s
        self._game = Game(game, dict(game_options or {}), download_timeout_s)
        self._pace = Pace()
        self._first_text = lru_cache(MAX_REMEMBERED)(self._look_at)
        self._secrets: list[str] | None = None
        parser = parser or XMLParser(["think", "guess"], answer_field="guess")
        rows: dict[str, Any] = {**split_seeds(num_train_examples, num_eval_examples, 0, self._row)}
        super().__init__(
            **{**rows, **kwargs},
            system_prompt=system_prompt,
            parser=parser,
            rubric=rubric or EpisodicSumRubric(parser=parser),
        )

    @property
    def ta_env(self) -> Any:
        """TextArena's own game, which nobody plays."""
        return self._game.template

    # Rows

    def _row(self, index: int) -> dict[str, Any]:
        secrets = self._drawn_secrets()
        seed = self.seed + index
        answer = secrets[index] if secrets else str(seed)
        question = self._first_text(self.seed if secrets else seed)
        return {"question": question, "answer": answer, "info": {"seed": seed}}

    def _drawn_secrets(self) -> list[str]:
        if self._secrets is None:
            words = self._game.words
            rng = random.Random(self.seed)
            total = self.num_train_examples + self.num_eval_examples
            self._secrets = [rng.choice(words) for _ in range(total)] if words else []
        return self._secrets

    def _look_at(self, seed: int) -> str:
        with guest(f"starting {self.game}"):
            player, text = self._game.start(self.num_players, seed).observe()
            return self.feedback_fn(text) if player == self.player_id else text

    # One match

    async def setup_state(self, state: State) -> State | None:
        """Start the row's match; opponents who come first make their moves."""
        calls = EpisodeCalls(self._pace, self.step_timeout_s)
        state["ta_calls"] = calls
        seed = _seed_of(state)
        with guest(f"starting {self.game}"):
            match: Match = await calls(self._game.start, self.num_players, seed)
        state["ta_match"], state["ta_env"] = match, match.env
        known = getattr(match.state, "game_state", None)
        if isinstance(known, dict) and "secret_word" in known:
            known["secret_word"] = state["answer"]
        text = await self._until_my_turn(state)
        prompt = [message_from(message) for message in state["prompt"]]
        if text is None:
            raise EnvironmentFault(f"{self.game} was over before the model's first move")
        if prompt and prompt[-1]["role"] == "user":
            state["prompt"] = [*prompt[:-1], UserMessage(content=text)]
        return state

    async def act(self, messages: Messages, state: State) -> tuple[Any, bool]:
        """Make the model's move, and those of its opponents."""
        match: Match = state["ta_match"]
        move = self.parser.parse_answer(messages) or ""
        with guest(f"{self.game}, move {str(move)[:80]!r}"):
            is_over = await state["ta_calls"](match.step, str(move))
        text = None if is_over else await self._until_my_turn(state)
        if text is not None:
            return [UserMessage(content=text)], False
        return [UserMessage(content=self._ended(match, state))], True

    async def _until_my_turn(self, state: State) -> str | None:
        """What the model sees when it is its turn; None when the game ended before."""
        match: Match = state["ta_match"]
        calls: EpisodeCalls = state["ta_calls"]
        for _ in range(MAX_OPPONENT_MOVES):
            if match.state.done:
                return None
            player, text = await calls(lambda: match.observe(new_only=self.new_only))
            if player == self.player_id:
                return str(self.feedback_fn(text))
            move = await self._opponent_move(match, text)
            with guest(f"{self.game}, the opponent's move {move[:80]!r}"):
                if await calls(match.step, move):
                    return None
        raise EnvironmentFault(f"{self.game}: {MAX_OPPONENT_MOVES} moves of opponents without a turn of the model")

    async def _opponent_move(self, match: Match, text: str) -> str:
        if callable(self.opponent):
            with guest("the opponent"):
                move = self.opponent(text)
                return str(await move if inspect.isawaitable(move) else move)
        for line in reversed(text.splitlines()):
            options = {option for option in BRACKETED.findall(line) if not SPEAKER.match(option)}
            if options:
                return match.random_choice(sorted(options))
        return ""

    def _ended(self, match: Match, state: State) -> str:
        info = match.state.game_info
        broken = [player for player in range(self.num_players) if info.get(player, {}).get("invalid_move")]
        if broken and self.player_id not in broken:
            raise EnvironmentFault(
                f"{self.game}: the opponent's move was invalid, so the game says nothing about the model; "
                "give an opponent that knows the rules"
            )
        rewards = dict(match.state.rewards or {})
        state["ta_rewards"], state["ta_info"] = rewards, info
        state["trajectory"][-1]["reward"] = float(rewards.get(self.player_id, 0.0))
        return str(info.get(self.player_id, {}).get("reason") or "The game is over.")

    @cleanup
    async def cleanup_ta_env(self, state: State) -> None:
        """Let go of the match."""
        for name in ("ta_match", "ta_env"):
            state.pop(name, None)
        calls: EpisodeCalls | None = state.pop("ta_calls", None)
        if calls is not None:
            await calls.close(lambda: None)


def _seed_of(state: State) -> int:
    info = state.get("info")
    seed = info.get("seed") if isinstance(info, Mapping) else None
    return int(seed) if seed is not None else int(state.get("example_id") or 0)
