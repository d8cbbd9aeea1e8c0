"""TextArena's games: loaded once, copied for each episode, each with randomness of its own.

Parts: `Game`, a kind of game; `Match`, one episode of it. Invariants: what is large and never changes (dictionaries,
word lists) is shared by the copies; no game touches the process-wide random generator, so games played side by side
repeat by their seeds; a corpus that is missing is fetched within a time limit or named in one line.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from mettle.envs.guests import imported
from mettle.errors import UserError

SHARED_SIZE = 500
"""Collections of so many entries are shared by the copies of a game."""
CORPUS_KINDS = ("corpora", "taggers", "tokenizers")
_rng: ContextVar[random.Random | None] = ContextVar("randomness of the episode", default=None)
_numpy_lock = threading.Lock()


class _EpisodeRandom:
    """Stands for the module `random` in TextArena's modules: the episode's generator, or the module outside of one."""

    def __getattr__(self, name: str) -> Any:
        source = _rng.get()
        return getattr(source if source is not None and hasattr(source, name) else random, name)


_EPISODE_RANDOM = _EpisodeRandom()


class Game:
    """The game `name` of TextArena, loaded when it is first needed."""

    def __init__(self, name: str, options: dict[str, Any], download_timeout_s: float) -> None:
        self.name = name
        self._options = options
        self._download_timeout_s = download_timeout_s
        self._template: Any = None
        self._shared: dict[int, Any] = {}
        self._lock = threading.Lock()

    @property
    def template(self) -> Any:
        """A game that nobody plays.

        Raises: UserError when there is no such game, or its corpora are not to be had.
        """
        with self._lock:
            if self._template is None:
                self._template = self._load()
                self._shared = {id(value): value for value in _large_values(self._template)}
            return self._template

    @property
    def words(self) -> list[str]:
        """The words that a secret one is drawn from; none for games without."""
        listed = getattr(innermost(self.template), "word_list", None) or []
        if isinstance(listed, dict):
            groups = (value if isinstance(value, list | tuple) else [value] for value in listed.values())
            return [word for group in groups for word in group]
        return list(listed)

    def start(self, num_players: int, seed: int) -> Match:
        """A new match."""
        template = self.template
        match = Match(copy.deepcopy(template, dict(self._shared)), seed)
        match.reset(num_players, seed)
        return match

    def _load(self) -> Any:
        arena = imported("textarena", adapter="textarena", needed_by="TextArenaEnv")
        known = imported("textarena.envs.registration", adapter="textarena", needed_by="TextArenaEnv").ENV_REGISTRY
        if self.name not in known:
            near = difflib.get_close_matches(self.name, known, 3)
            raise UserError(f"TextArena has no game {self.name!r}; nearest are {', '.join(near) or 'none'}")
        missing: list[str] = []
        try:
            with _corpora(self._download_timeout_s, missing):
                game = arena.make(env_id=self.name, **self._options)
        except LookupError as error:
            corpora = " ".join(dict.fromkeys(missing)) or "corpora"
            raise UserError(
                f"{self.name} needs nltk's {corpora}, not on this machine and not downloaded within "
                f"{self._download_timeout_s} s: python -m nltk.downloader {corpora}, or set NLTK_DATA"
            ) from error
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            raise UserError(f"{self.name} cannot be loaded: {type(error).__name__}: {first_line}") from error
        _give_own_randomness()
        return game


class Match:
    """One episode of a game; its methods are called one at a time."""

    def __init__(self, env: Any, seed: int) -> None:
        self.env = env
        self._rng = random.Random(seed)
        self._seen: dict[int, str] = {}

    def reset(self, num_players: int, seed: int) -> None:
        """Begin."""
        with self._own_random(), _numpy_seeded(self.env, seed):
            self.env.reset(num_players=num_players, seed=seed)
        _give_own_randomness()

    def step(self, action: str) -> bool:
        """One action of the player whose turn it is; whether the game is over."""
        with self._own_random():
            is_over, _ = self.env.step(action=action)
        return bool(is_over)

    def observe(self, *, new_only: bool = False) -> tuple[int, str]:
        """Whose turn it is and what that player sees; with `new_only`, what is new since the last look."""
        with self._own_random():
            player, seen = self.env.get_observation()
        text = seen if isinstance(seen, str) else "\n".join(str(message[1]) for message in seen)
        before = self._seen.get(player, "")
        self._seen[player] = text
        if new_only and before and text.startswith(before):
            return player, text[len(before) :].lstrip("\n")
        return player, text

    @property
    def state(self) -> Any:
        """TextArena's own state of the game."""
        return self.env.state

    def random_choice(self, options: list[str]) -> str:
        """One of `options`, by the match's own randomness."""
        return self._rng.choice(options)

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        token = _rng.set(self._rng)
        try:
            yield
        finally:
            _rng.reset(token)


def innermost(env: Any) -> Any:
    """The game itself, inside its wrappers."""
    while "env" in vars(env):
        env = env.env
    return env


def _large_values(env: Any) -> Iterator[Any]:
    for value in vars(innermost(env)).values():
        is_large = isinstance(value, set | frozenset | list | dict | tuple) and len(value) >= SHARED_SIZE
        if is_large or type(value).__name__ == "EnglishDictionary":
            yield value


def _give_own_randomness() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("textarena") and getattr(module, "random", None) is random:
            vars(module)["random"] = _EPISODE_RANDOM


@contextlib.contextmanager
def _numpy_seeded(env: Any, seed: int) -> Iterator[None]:
    """Seed numpy's generator while a game that draws from it is set up, and put it back as it was."""
    package = type(innermost(env)).__module__.rpartition(".")[0]
    draws = any(hasattr(sys.modules.get(f"{package}.{part}"), "np") for part in ("env", "utils"))
    if not draws:
        yield
        return
    numpy = imported("numpy", adapter="textarena", needed_by="TextArenaEnv")
    with _numpy_lock:
        before = numpy.random.get_state()
        numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            numpy.random.set_state(before)


# Corpora


@contextlib.contextmanager
def _corpora(timeout_s: float, missing: list[str]) -> Iterator[None]:
    """Let the games' `nltk.download` look here first, and fetch in a process that can be given up."""
    nltk = imported("nltk", adapter="textarena", needed_by="TextArenaEnv")

    def download(names: Any = None, *_: Any, **__: Any) -> bool:
        wanted = [names] if isinstance(names, str) else list(names or [])
        lacking = [name for name in wanted if not _has_corpus(nltk, name)]
        if lacking and not _fetched(lacking, timeout_s):
            missing.extend(lacking)
            raise LookupError(f"no {', '.join(lacking)}")
        return True

    original: Callable[..., Any] = nltk.download
    nltk.download = download
    try:
        yield
    finally:
        nltk.download = original


def _has_corpus(nltk: Any, name: str) -> bool:
    for path in (f"{kind}/{name}{end}" for kind in CORPUS_KINDS for end in ("", ".zip")):
        with contextlib.suppress(LookupError):
            nltk.data.find(path)
            return True
    return False


def _fetched(names: list[str], timeout_s: float) -> bool:
    if timeout_s <= 0:
        return False
    command = [sys.executable, "-m", "nltk.downloader", "-q", *names]
    try:
        return subprocess.run(command, timeout=timeout_s, capture_output=True, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
