"""Why the recorded log-probabilities are not the trainer's: each cause is imitated, and the one that fits is named.

    compare ──► differences ──► every sequence within the tolerance? ──► healthy
                                   │ no: those sequences alone
                                   ▼
    no adapter · older weights · another prompt · another sampling parameter · rounded weights
                                   │ what is left of the differences under each
                                   ▼
    the least, if little is left; else the cause is unknown, and the table says where it shows

Where some replicas of the engine are beyond it and others are not, the cause is looked for on each of those, by name.

A cause that reproduces the engine leaves nothing. Rounding is done by other kernels there and here, which round the
same weights to other noise: where nothing else fits, noise around 0 of the size that rounding makes here is called so.
Several ranks share the sequences, and each finds what all of them found. Legend: K compared tokens of a sequence, V
vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mettle.records.sampling import SamplingParams
from mettle.trainer.learner import Learner
from mettle.trainer.mismatch.prompts import variants
from mettle.trainer.mismatch.sampling import SEARCHED, Floats, fit, recorded_under
from mettle.trainer.mismatch.table import UNTOLD, Row, cuts, sequence_means
from mettle.trainer.mismatch.tokens import ComparedSequence
from mettle.trainer.mismatch.weights import as_bfloat16, as_int8, rounded, version_weights, without_adapter

LEFT_BY_A_CAUSE = 0.15
"""Largest share of the differences that an exact cause may leave."""
LEFT_IN_FLOAT32 = 1e-4
TIE = 1e-6
"""Nats that are the noise of two sums of the same numbers."""
NOISE_RATIO = 2.5
"""How far the noise of rounding there may be from the noise here, either way."""
MAX_OLDER = 4
MAX_PROBED = 8
"""Sequences that causes are tried on."""
MAX_REPLICAS = 4
"""Replicas that causes are looked for on, one by one."""
NUM_LOGITS = 2**24
UNKNOWN = "unknown"
NEVER_DRAWN = 20.0
"""What a token counts that could not have been drawn, in nats."""

CAUSE_OF = {
    "temperature": "temperature",
    "repetition_penalty": "penalty",
    "presence_penalty": "penalty",
    "frequency_penalty": "penalty",
    "top_p": "truncation",
    "top_k": "truncation",
    "min_p": "truncation",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """A cause that was imitated. `left` is the mean absolute difference that it does not account for, in nats.

    `noise` is how much it moves the log-probabilities itself, told of rounding alone.
    """

    cause: str
    detail: str
    left: float
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class MismatchFound:
    """What a look found. `cause` is "" where engine and trainer agree, and "unknown" where nothing explains it.

    `mean_abs` and `max_abs` are over all compared tokens, `affected` counts sequences beyond the tolerance. `replicas`
    are those of the engine that disagree while others agree; the cause is that of the first, which is worst.
    """

    mean_abs: float
    max_abs: float
    num_tokens: int
    num_sequences: int
    affected: int
    cause: str
    detail: str
    table: dict[str, list[Row]]
    replicas: tuple[str, ...] = ()


class Named(NamedTuple):
    """A cause, and the replicas that it is of where it is not of all."""

    cause: str
    detail: str
    replicas: tuple[str, ...] = ()


class Comparer:
    """A trainer's network against what engines recorded. `current` is the version that the network holds."""

    def __init__(self, learner: Learner, current: int, folders: Mapping[int, Path]) -> None:
        self._learner = learner
        self._current = current
        self._folders = folders

    @torch.no_grad()
    def compare(self, sequences: Sequence[ComparedSequence], tolerance: float) -> MismatchFound | None:
        """Compare, and look for the cause where some sequence is beyond the tolerance; None if nothing compares."""
        found = [s for s in sequences if s.version == self._current or s.version in self._folders]
        found.sort(key=lambda s: (s.version, s.number))
        differences = [s.recorded.astype(np.float64) - own for s, own in zip(found, self._each(found), strict=True)]
        if not found:
            return None
        means = sequence_means(differences)
        bad = [i for i, mean in enumerate(means) if not mean <= tolerance]
        size = np.abs(np.concatenate(differences))
        named = self._named(found, means, bad) if bad else Named("", "")
        return MismatchFound(
            float(size.mean()), float(size.max()), len(size), len(found), len(bad), named.cause, named.detail,
            cuts(found, differences), named.replicas,
        )  # fmt: skip

    def _named(self, found: list[ComparedSequence], means: Floats, bad: list[int]) -> Named:
        """The cause, for all replicas or for each of those that are beyond the tolerance."""
        everywhere = {sequence.replica for sequence in found}
        of_replica: dict[str, list[int]] = {}
        for i in sorted(bad, key=lambda i: -means[i]):
            of_replica.setdefault(found[i].replica, []).append(i)
        if len(of_replica) == len(everywhere):
            cause, detail = self._worst_cause(found, means, bad)
            if cause != UNKNOWN or len(everywhere) == 1:
                return Named(cause, detail)
        causes = {
            replica: self._worst_cause(found, means, own) for replica, own in list(of_replica.items())[:MAX_REPLICAS]
        }
        details = [f"{replica or UNTOLD} alone: {detail}" for replica, (_, detail) in causes.items()]
        cause = next(iter(causes.values()))[0]
        return Named(cause, f"of {len(everywhere)} replicas " + "; ".join(details), tuple(of_replica))

    def _worst_cause(self, found: list[ComparedSequence], means: Floats, bad: list[int]) -> tuple[str, str]:
        worst = sorted(bad, key=lambda i: -means[i])[:MAX_PROBED]
        return self._cause([found[i] for i in sorted(worst)], float(np.mean(means[worst])))

    def _cause(self, sequences: list[ComparedSequence], mismatch: float) -> tuple[str, str]:
        # Where ranks compute the same side by side, the last bit may differ, and with it who is asked for what next.
        tried = self._learner.world.share(list(self._explanations(sequences)))
        least = min(e.left for e in tried)
        # The first of those that account for it alike: a new adapter is the base, so "not loaded" is also "v0".
        best = next(e for e in tried if e.left <= least + TIE)
        if best.left <= max(LEFT_IN_FLOAT32, LEFT_BY_A_CAUSE * mismatch):
            return best.cause, best.detail
        noise = [e for e in tried if mismatch / NOISE_RATIO <= e.noise <= mismatch * NOISE_RATIO]
        if noise and self._is_centred(sequences):
            nearest = min(noise, key=lambda e: abs(np.log(e.noise / mismatch)))
            return nearest.cause, nearest.detail
        return UNKNOWN, "no single cause that can be imitated accounts for it"

    def _is_centred(self, sequences: list[ComparedSequence]) -> bool:
        own = np.concatenate(self._each(sequences))
        differences = np.concatenate([s.recorded for s in sequences]) - own
        return bool(abs(differences.mean()) < np.abs(differences).mean() / 2)

    def _explanations(self, sequences: list[ComparedSequence]) -> Iterator[Explanation]:
        if self._learner.tenant.adapter is not None:
            left = _left(sequences, self._each(sequences, lambda: without_adapter(self._learner)))
            yield Explanation("adapter", "the engine samples with the base alone: the adapter is not loaded", left)
        yield from self._older_weights(sequences)
        yield from self._prompts(sequences)
        yield from self._sampling(sequences)
        own = self._each(sequences)
        for form, name in ((as_bfloat16, "bfloat16"), (as_int8, "int8")):
            there = self._each(sequences, partial(rounded, self._learner.policy, form))
            noise = float(np.mean([np.abs(one - other).mean() for one, other in zip(own, there, strict=True)]))
            detail = f"the engine computes with weights in {name}"
            yield Explanation(name, detail, _left(sequences, there), noise)

    def _older_weights(self, sequences: list[ComparedSequence]) -> Iterator[Explanation]:
        for lag in range(1, MAX_OLDER + 1):
            moved = [replace(s, version=s.version - lag) for s in sequences]
            if all(s.version in self._folders for s in moved):
                versions = sorted({s.version for s in sequences})
                told = ", ".join(f"v{v} was v{v - lag}" for v in versions)
                yield Explanation("stale weights", f"a replica served older weights than it said: {told}",
                                  _left(sequences, self._each(moved)))  # fmt: skip

    def _prompts(self, sequences: list[ComparedSequence]) -> Iterator[Explanation]:
        tried: dict[str, list[ComparedSequence]] = {}
        for sequence in sequences:
            for name, altered, _ in variants(sequence):
                tried.setdefault(name, []).append(altered)
        for name, altered_ones in tried.items():
            if len(altered_ones) == len(sequences):  # a cause is one for all of them
                left = _left(altered_ones, self._each(altered_ones))
                yield Explanation("template", f"the engine saw another prompt: {name}", left)

    def _sampling(self, sequences: list[ComparedSequence]) -> Iterator[Explanation]:
        limit = max(8, NUM_LOGITS // self._learner.policy.vocab_size)
        logits_KV, ids_K, contexts, recorded = self._rows(sequences, limit)
        start = SamplingParams(temperature=float(sequences[0].temperatures[0]))

        def error_of(how: SamplingParams) -> float:
            own = recorded_under(logits_KV, ids_K, contexts, how)
            return float(np.minimum(np.abs(own - recorded), NEVER_DRAWN).mean())

        for name in SEARCHED:
            how, left = fit(name, start, error_of)
            asked = getattr(start, name)
            detail = f"the engine draws with {name} {getattr(how, name):.3g}, where {asked:.3g} was asked for"
            yield Explanation(CAUSE_OF[name], detail, left)

    def _rows(
        self, sequences: list[ComparedSequence], limit: int
    ) -> tuple[Tensor, Tensor, list[tuple[list[int], list[int]]], Floats]:
        """Logits [K, V], tokens [K], (prompt, sampled so far) and what was recorded, of at most `limit` tokens."""
        logits, ids, contexts, recorded = [], [], [], []
        share = max(1, limit // len(sequences))
        for sequence in sequences:
            places = sequence.places[:share]
            with self._weights(sequence.version):
                logits.append(self._logits(sequence.token_ids, places, sequence.experts[:share]))
            ids.append(torch.from_numpy(sequence.token_ids[places]))
            recorded.append(sequence.recorded[: len(places)])
            tokens = sequence.token_ids.tolist()
            contexts += [
                (tokens[:start], tokens[start:place])
                for start, place in zip(sequence.turn_starts.tolist(), places.tolist(), strict=False)
            ]
        stacked = torch.cat(logits)
        return stacked, torch.cat(ids).to(stacked.device), contexts, np.concatenate(recorded).astype(np.float64)

    def _each(
        self,
        sequences: Sequence[ComparedSequence],
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[Floats]:
        """The log-probabilities of each sequence under its version's weights, computed `within` a context.

        Every rank has all of them in the end. The ranks go in step: all have the same weights at a time, and those
        that have no sequence left compute the last one again.
        """
        world = self._learner.world
        found: dict[int, Floats] = {}
        for version in sorted({sequence.version for sequence in sequences}):
            numbers = [i for i, sequence in enumerate(sequences) if sequence.version == version]
            rounds = -(-len(numbers) // world.size)
            turns = [min(i * world.size + world.rank, len(numbers) - 1) for i in range(rounds)]
            with self._weights(version), within():
                computed = {numbers[i]: self._logprobs(sequences[numbers[i]]) for i in turns}
            for own in world.gather(computed):
                found |= own
        return [found[i] for i in range(len(sequences))]

    def _weights(self, version: int) -> AbstractContextManager[None]:
        return nullcontext() if version == self._current else version_weights(self._learner, self._folders[version])

    def _logprobs(self, sequence: ComparedSequence) -> Floats:
        policy = self._learner.policy
        temperatures_K = torch.from_numpy(sequence.temperatures).to(next(policy.parameters()).device)
        found_K = policy.logprobs_at(sequence.token_ids, sequence.places, sequence.experts, temperatures_K)
        found: Floats = found_K.double().cpu().numpy()
        return found

    def _logits(self, token_ids: Any, places: Any, experts: Any) -> Tensor:
        return self._learner.policy.logits_at(token_ids, places, experts)


def readable_folders(root: Path) -> dict[int, Path]:
    """The versions that are published in `root`."""
    found = {}
    for folder in root.glob("v*"):
        if folder.name[1:].isdigit() and (folder / "manifest.json").exists():
            found[int(folder.name[1:])] = folder
    return found


def _left(sequences: Sequence[ComparedSequence], logprobs: Sequence[Floats]) -> float:
    pairs = zip(sequences, logprobs, strict=True)
    return float(np.mean([np.abs(s.recorded.astype(np.float64) - own).mean() for s, own in pairs]))
