"""Drawing tokens: Gumbel noise on the log-softmax that is also what gets recorded.

Legend: B rows, V vocabulary. The recorded log-probabilities are those of the distribution sampled from: after biases,
penalties, grammars, the temperature and truncation. At temperature 0 they are those before a temperature. A row with a
seed has a generator of its own and draws V numbers a token, so its tokens do not depend on who else is in the batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from mettle.inference.engine.grammars import TokenConstraint
from mettle.inference.engine.penalties import LogitShifts, PenalisedRow
from mettle.inference.engine.protocol import Redraw, RedrawnToken, TokenLogprob
from mettle.records.sampling import SamplingParams

_TINIEST = 1e-37
_SEED_MASK = 2**64 - 1


class SamplingRow(PenalisedRow, Protocol):
    """What the sampler reads of a running sequence."""

    num_top_logprobs: int
    constraint: TokenConstraint | None
    is_replaying: bool

    @property
    def noise(self) -> np.random.Generator | None:
        """What a row with a seed draws from."""


class SampledTokens(NamedTuple):
    """One token a row. `top_logprobs` has an entry for each row that asked for alternatives."""

    token_ids_B: Tensor
    logprobs: list[float]
    top_logprobs: dict[int, list[TokenLogprob]]


def choice_noise(seed: int, index: int) -> np.random.Generator:
    """The noise of choice `index` of a request with a seed."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence((seed & _SEED_MASK, index))))


class Redrawing:
    """Draws again, in their order, the tokens of a choice that was drawn elsewhere; see `Redraw`."""

    def __init__(self, redraw: Redraw) -> None:
        self._noise = choice_noise(redraw.seed, redraw.index)
        self._temperature = redraw.temperature
        self.start = redraw.start
        self.found: list[RedrawnToken] = []

    def take(self, logits_PV: Tensor, targets_P: Tensor) -> None:
        """The next P tokens, and the logits that they were drawn from. At temperature 0 nothing is drawn: the likeliest
        token is taken, and its logprob is the one before a temperature."""
        logprobs_PV = torch.log_softmax(logits_PV / (self._temperature or 1.0), -1)
        scores_PV = logprobs_PV
        if self._temperature > 0.0:
            noise_PV = torch.from_numpy(self._noise.standard_exponential(tuple(logits_PV.shape), dtype=np.float32))
            scores_PV = logprobs_PV - noise_PV.clamp_min_(_TINIEST).log_().to(logprobs_PV.device)
        own = logprobs_PV.gather(1, targets_P[:, None])[:, 0]
        short = scores_PV.amax(-1) - scores_PV.gather(1, targets_P[:, None])[:, 0]
        self.found += map(RedrawnToken, own.tolist(), short.tolist())


class SamplingPlan:
    """How a set of rows is sampled, worked out once and used until the set changes."""

    def __init__(self, rows: Sequence[SamplingRow], device: torch.device) -> None:
        params = [row.params for row in rows]
        self.greedy = [i for i, p in enumerate(params) if p.temperature == 0.0]
        self.is_all_greedy = len(self.greedy) == len(rows)
        self.seeded = [(i, row.noise) for i, row in enumerate(rows) if row.noise is not None]
        self.num_top = {i: row.num_top_logprobs for i, row in enumerate(rows) if row.num_top_logprobs}
        temperatures = [p.temperature or 1.0 for p in params]
        self.temperature_B1: Tensor | None = None
        if any(t != 1.0 for t in temperatures):
            self.temperature_B1 = torch.tensor(temperatures, device=device)[:, None]
        moved = [i for i, p in enumerate(params) if p.has_penalty or p.logit_bias]
        self._moved = (moved, [rows[i] for i in moved])
        self._device = device
        self._shifts: LogitShifts | None = None
        self.constraints = [
            (i, row.constraint) for i, row in enumerate(rows) if row.constraint is not None and not row.is_replaying
        ]
        cut = [i for i, p in enumerate(params) if p.is_truncating]
        self.truncation = Truncation.of([params[i] for i in cut], cut, device) if cut else None

    def shifts(self, vocab_size: int) -> LogitShifts | None:
        """The biases and penalties, if any row has some; counted from what the rows have at the first call."""
        places, rows = self._moved
        if rows and self._shifts is None:
            self._shifts = LogitShifts(rows, places, vocab_size, self._device)
        return self._shifts


class Truncation(NamedTuple):
    """The rows R whose support is cut, and how."""

    rows_R: Tensor
    top_k_R1: Tensor
    top_p_R1: Tensor
    min_p_R1: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], rows: Sequence[int], device: torch.device) -> Truncation:
        """Tensors of the parameters; a limit that is off becomes one that cuts nothing."""
        no_limit = 2**31 - 1
        return cls(
            torch.tensor(rows, device=device),
            torch.tensor([p.top_k if p.top_k > 0 else no_limit for p in params], device=device)[:, None],
            torch.tensor([p.top_p for p in params], device=device)[:, None],
            torch.tensor([p.min_p for p in params], device=device)[:, None],
        )

    def apply(self, logits_BV: Tensor) -> Tensor:
        """Logits with -inf outside the support: top_k first, then top_p of what is left, then min_p."""
        logits_RV, order_RV = logits_BV[self.rows_R].sort(dim=-1, descending=True, stable=True)
        ranks_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
        logits_RV = logits_RV.masked_fill(ranks_V >= self.top_k_R1, -torch.inf)
        probs_RV = torch.softmax(logits_RV, -1)
        before_RV = probs_RV.cumsum(-1) - probs_RV
        is_cut_RV = (before_RV >= self.top_p_R1) | (probs_RV < self.min_p_R1 * probs_RV[:, :1])
        is_cut_RV[:, 0] = False
        kept_RV = logits_RV.masked_fill(is_cut_RV, -torch.inf)
        result_BV = logits_BV.clone()
        result_BV[self.rows_R] = torch.empty_like(kept_RV).scatter_(1, order_RV, kept_RV)
        return result_BV


class BatchSampler:
    """Draws for rows without a seed from one generator; `seed` None takes one from the operating system."""

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._device = device
        root = secrets.randbits(63) if seed is None else seed
        self._noise = choice_noise(root, 0)
        self._device_noise = torch.Generator(device).manual_seed(root % 2**63) if device.type != "cpu" else None
        self._buffer = np.empty((0, 0), dtype=np.float32)

    def sample(self, logits_BV: Tensor, plan: SamplingPlan) -> SampledTokens:
        """One token for each row."""
        shifts = plan.shifts(logits_BV.shape[1])
        if shifts is not None:
            logits_BV = shifts.apply(logits_BV)
        if plan.constraints:
            logits_BV = _constrained(logits_BV, plan.constraints)
        if plan.temperature_B1 is not None:
            logits_BV = logits_BV / plan.temperature_B1
        if plan.truncation is not None:
            logits_BV = plan.truncation.apply(logits_BV)
        logprobs_BV = torch.log_softmax(logits_BV, -1)
        scores_BV = logprobs_BV if plan.is_all_greedy else logprobs_BV - self._log_exponentials(logprobs_BV, plan)
        token_ids_B = scores_BV.argmax(-1)
        if shifts is not None:
            shifts.count(token_ids_B)
        picked_B = logprobs_BV.gather(1, token_ids_B[:, None])[:, 0]
        return SampledTokens(token_ids_B, picked_B.tolist(), _top_logprobs(logprobs_BV, plan))

    def _log_exponentials(self, logprobs_BV: Tensor, plan: SamplingPlan) -> Tensor:
        # argmax(logp - log E), E ~ Exp(1), samples from p. On a CPU NumPy draws exponentials several times faster.
        num_rows, vocab_size = logprobs_BV.shape
        if self._device_noise is not None:
            noise_BV = torch.empty_like(logprobs_BV).exponential_(generator=self._device_noise)
            for i, generator in plan.seeded:
                noise_BV[i] = torch.from_numpy(generator.standard_exponential(vocab_size, dtype=np.float32))
        else:
            noise_BV = torch.from_numpy(self._host_exponentials(num_rows, vocab_size, plan))
        log_BV = noise_BV.clamp_min_(_TINIEST).log_()
        if plan.greedy:
            log_BV[plan.greedy] = 0.0
        return log_BV

    def _host_exponentials(self, num_rows: int, vocab_size: int, plan: SamplingPlan) -> np.ndarray:
        if self._buffer.shape[0] < num_rows or self._buffer.shape[1] != vocab_size:
            self._buffer = np.empty((max(num_rows, 2 * self._buffer.shape[0]), vocab_size), dtype=np.float32)
        noise_BV = self._buffer[:num_rows]
        if len(plan.seeded) < num_rows:
            self._noise.standard_exponential(out=noise_BV, dtype=np.float32)
        for i, generator in plan.seeded:
            generator.standard_exponential(out=noise_BV[i], dtype=np.float32)
        return noise_BV


def _constrained(logits_BV: Tensor, constraints: Sequence[tuple[int, TokenConstraint]]) -> Tensor:
    """Logits with -inf where a row's grammar has no such token."""
    logits_BV = logits_BV.clone()
    for row, constraint in constraints:
        is_allowed_V = torch.from_numpy(constraint.allowed()).to(logits_BV.device)
        logits_BV[row].masked_fill_(~is_allowed_V, -torch.inf)
    return logits_BV


def _top_logprobs(logprobs_BV: Tensor, plan: SamplingPlan) -> dict[int, list[TokenLogprob]]:
    top: dict[int, list[TokenLogprob]] = {}
    for row, count in plan.num_top.items():
        values, ids = logprobs_BV[row].topk(min(count, logprobs_BV.shape[1]))
        top[row] = [TokenLogprob(i, v) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return top
