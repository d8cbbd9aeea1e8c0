"""The sampler against a NumPy twin: what is cut, what is drawn, and what is recorded of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mettle.inference.engine.grammars import TokenConstraint
from mettle.inference.engine.protocol import Redraw
from mettle.inference.engine.sampler import BatchSampler, Redrawing, SampledTokens, SamplingPlan, choice_noise
from mettle.records.sampling import SamplingParams

CPU = torch.device("cpu")
PROBS = np.array([0.4, 0.3, 0.2, 0.06, 0.04], dtype=np.float32)


@dataclass
class Row:
    params: SamplingParams
    noise: np.random.Generator | None = None
    num_top_logprobs: int = 0
    constraint: TokenConstraint | None = None
    is_replaying: bool = False


def row(seed: int | None = None, *, top: int = 0, **params: Any) -> Row:
    return Row(SamplingParams(**params), None if seed is None else choice_noise(seed, 0), top)


def plan_of(*rows: Row) -> SamplingPlan:
    return SamplingPlan(rows, CPU)


def sample(rows: list[Row], probs: Any = PROBS, sampler: BatchSampler | None = None) -> SampledTokens:
    logits_BV = torch.from_numpy(np.log(np.broadcast_to(probs, (len(rows), np.shape(probs)[-1])).copy()))
    return (sampler or BatchSampler(CPU, seed=3)).sample(logits_BV, plan_of(*rows))


def support(probs: np.ndarray, **params: Any) -> list[int]:
    """The tokens that are left of `probs` after truncation."""
    plan = plan_of(row(**params))
    assert plan.truncation is not None
    kept_BV = plan.truncation.apply(torch.from_numpy(np.log(probs))[None])
    return np.flatnonzero(np.isfinite(kept_BV[0].numpy())).tolist()


def expected_support(probs: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """The twin: `top_k` first, `top_p` of what is left, then what is below `min_p` of the likeliest."""
    order = np.argsort(-probs, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    left = probs[order] / probs[order].sum()
    mass, kept = 0.0, []
    for at, (token, prob) in enumerate(zip(order, left, strict=True)):
        if at == 0 or (mass < top_p and prob >= min_p * left[0]):
            kept.append(int(token))
        mass += prob
    return sorted(kept)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.39}, [0]),
        ({"top_p": 0.41}, [0, 1]),
        ({"top_p": 0.85}, [0, 1, 2]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.76}, [0]),
        ({"min_p": 0.74}, [0, 1]),
        ({"min_p": 0.4}, [0, 1, 2]),
        ({"min_p": 0.12}, [0, 1, 2, 3]),
        ({"min_p": 0.09}, [0, 1, 2, 3, 4]),
        ({"min_p": 1.0}, [0]),
        # Of the two that top_k leaves, the first has .57 of the mass.
        ({"top_k": 2, "top_p": 0.5}, [0]),
        ({"top_k": 2, "top_p": 0.6}, [0, 1]),
        # min_p looks at the distribution before top_p, whose cut does not raise the others.
        ({"top_p": 0.85, "min_p": 0.6}, [0, 1]),
    ],
)
def test_the_support_is_what_each_limit_says(params: dict[str, Any], kept: list[int]) -> None:
    assert support(PROBS, **params) == kept
    assert expected_support(PROBS, **params) == kept


def test_min_p_is_a_share_of_the_likeliest_and_keeps_what_is_just_at_it() -> None:
    halves = np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32)
    assert support(halves, min_p=0.5) == [0, 1]
    assert support(halves, min_p=0.25) == [0, 1, 2, 3]
    assert support(halves, min_p=0.26) == [0, 1]


def test_top_p_stops_as_soon_as_the_mass_is_reached() -> None:
    halves = np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32)
    assert support(halves, top_p=0.5) == [0]
    assert support(halves, top_p=0.75) == [0, 1]


@given(
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=12, unique=True),
    st.integers(0, 12), st.floats(0.05, 1.0), st.floats(0.0, 1.0),
)  # fmt: skip
@example([0.1, 0.2, 0.7], 0, 0.85, 0.2)
def test_the_support_is_that_of_the_twin(masses: list[float], top_k: int, top_p: float, min_p: float) -> None:
    probs = (np.array(masses) / np.sum(masses)).astype(np.float32)
    order = -np.sort(-probs)
    left = order[: top_k or None] / order[: top_k or None].sum()
    edges = [*(np.cumsum(left) - top_p), *(left - min_p * left[0])]
    if min(map(abs, edges[1:] if min_p == 1.0 else edges)) < 1e-5:
        return  # where rounding decides, both are right
    params = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    if SamplingParams(**params).is_truncating:
        assert support(probs, **params) == expected_support(probs, **params)


def test_a_limit_of_mass_alone_cuts_no_large_vocabulary_by_rank() -> None:
    assert support(np.full(300, 1 / 300, dtype=np.float32), top_p=0.9999) == list(range(300))


class OnlyThese:
    """Stands for a grammar that allows these tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def allowed(self) -> np.ndarray:
        return np.isin(np.arange(len(PROBS)), self.tokens)


def test_a_rows_grammar_holds_for_it_alone_and_only_while_it_samples() -> None:
    grammar: Any = OnlyThese(2, 4)
    kept, free, again = row(temperature=0.0), row(temperature=0.0), row(temperature=0.0)
    kept.constraint = again.constraint = grammar
    again.is_replaying = True  # its tokens are known, and the grammar does not stand where they do
    found = sample([kept, free, again])
    assert found.token_ids_B.tolist() == [2, 0, 0]
    assert np.exp(found.logprobs) == pytest.approx([0.2 / 0.24, 0.4, 0.4], rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_what_was_drawn_falls_short_of_nothing_and_all_else_by_what_the_twin_says(temperature: float) -> None:
    logits_PV = np.random.default_rng(5).normal(0, 2, (6, 9)).astype(np.float32)
    scaled_PV = logits_PV.astype(np.float64) / (temperature or 1.0)
    logprobs_PV = scaled_PV - np.log(np.exp(scaled_PV).sum(-1, keepdims=True))
    drawing = row(7, temperature=temperature)
    drawn = [BatchSampler(CPU).sample(torch.from_numpy(one)[None], plan_of(drawing)) for one in logits_PV]
    said = [int(one.token_ids_B[0]) for one in drawn]
    noise_PV = choice_noise(7, 0).standard_exponential(logits_PV.shape, dtype=np.float32)
    scores_PV = logprobs_PV - np.log(noise_PV) if temperature else logprobs_PV
    for targets in (said, [(token + 1) % 9 for token in said]):
        again = Redrawing(Redraw(7, 0, 3, temperature))
        for part in (slice(0, 2), slice(2, 6)):
            again.take(torch.from_numpy(logits_PV[part]), torch.tensor(targets[part]))
        picked = np.arange(6), targets
        assert [one.logprob for one in again.found] == pytest.approx(logprobs_PV[picked], abs=1e-5)
        short = scores_PV.max(-1) - scores_PV[picked]
        assert [one.shortfall for one in again.found] == pytest.approx(short, abs=1e-5)
        assert (max(short) < 1e-9) == (targets == said)


def test_only_the_rows_that_ask_for_it_are_cut() -> None:
    plan = plan_of(row(), row(top_k=1), row(), row(top_k=2))
    assert plan.truncation is not None
    kept_BV = torch.isfinite(plan.truncation.apply(torch.from_numpy(np.log(np.stack([PROBS] * 4)))))
    assert kept_BV.sum(-1).tolist() == [5, 1, 5, 2]
    assert plan_of(row(), row()).truncation is None


def test_what_is_recorded_is_the_distribution_that_was_sampled_from() -> None:
    rows = [row(1), row(1, temperature=0.5), row(1, top_k=2), row(1, temperature=2.0, top_k=2), row(temperature=0.0)]
    drawn = sample(rows)
    cooled, warm = PROBS**2 / np.sum(PROBS**2), PROBS[:2] ** 0.5 / np.sum(PROBS[:2] ** 0.5)
    laws = [PROBS, cooled, PROBS[:2] / PROBS[:2].sum(), warm, PROBS]
    for token, logprob, law in zip(drawn.token_ids_B.tolist(), drawn.logprobs, laws, strict=True):
        assert logprob == pytest.approx(np.log(law[token]), abs=1e-5)
    assert drawn.token_ids_B[-1] == 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_greedy_row_takes_the_likeliest_whoever_is_beside_it(num_rows: int) -> None:
    others = [row(seed) for seed in range(num_rows)]
    for at in range(40):
        drawn = sample([*others, row(temperature=0.0)], sampler=BatchSampler(CPU, seed=at))
        assert drawn.token_ids_B[-1] == 0
        assert drawn.logprobs[-1] == pytest.approx(np.log(0.4), abs=1e-6)


def test_all_greedy_rows_draw_nothing() -> None:
    plan = plan_of(row(temperature=0.0), row(temperature=0.0))
    assert plan.is_all_greedy
    assert plan.greedy == [0, 1]
    assert plan.temperature_B1 is None
    sampler = BatchSampler(CPU, seed=5)
    logits_BV = torch.from_numpy(np.log(np.stack([PROBS] * 2)))
    sampler.sample(logits_BV, plan)
    mixed = plan_of(row(), row(temperature=0.0))
    assert not mixed.is_all_greedy
    assert sampler.sample(logits_BV, mixed).token_ids_B.tolist() == (
        BatchSampler(CPU, seed=5).sample(logits_BV, mixed).token_ids_B.tolist()
    )


@pytest.mark.parametrize("seed", [None, 11])
def test_frequencies_are_the_probabilities(seed: int | None) -> None:
    num_rows, rounds = 500, 8
    sampler, counts = BatchSampler(CPU, seed=2), np.zeros(len(PROBS))
    rows = [Row(SamplingParams(), None if seed is None else choice_noise(seed, i)) for i in range(num_rows)]
    for _ in range(rounds):
        counts += np.bincount(sample(rows, sampler=sampler).token_ids_B.numpy(), minlength=len(PROBS))
    error = np.sqrt(PROBS * (1 - PROBS) / (num_rows * rounds))
    assert np.all(np.abs(counts / (num_rows * rounds) - PROBS) < 5 * error)


def test_a_seeded_row_draws_the_same_in_any_company_and_at_any_place() -> None:
    def tokens(before: int, after: int) -> list[int]:
        mine, sampler = row(7), BatchSampler(CPU, seed=before)
        rows = [*(row() for _ in range(before)), mine, *(row(4) for _ in range(after))]
        return [int(sample(rows, sampler=sampler).token_ids_B[before]) for _ in range(12)]

    alone = tokens(0, 0)
    assert len(set(alone)) > 1
    assert tokens(3, 0) == tokens(0, 2) == tokens(2, 5) == alone


def test_rows_without_a_seed_draw_independently_and_a_seed_of_the_sampler_repeats_them() -> None:
    rows = [row() for _ in range(64)]
    first, again = (sample(rows, sampler=BatchSampler(CPU, seed=9)).token_ids_B.tolist() for _ in range(2))
    assert first == again
    assert len(set(first)) > 1
    others = [sample(rows, sampler=BatchSampler(CPU, seed=seed)).token_ids_B.tolist() for seed in (10, None, None)]
    assert len({tuple(tokens) for tokens in [first, *others]}) == 4


def test_fewer_rows_or_another_vocabulary_than_before_draw_as_many_as_they_need() -> None:
    sampler = BatchSampler(CPU, seed=1)
    for num_rows, vocab_size in ((4, 5), (2, 5), (9, 5), (3, 7), (10, 7)):
        probs = np.full(vocab_size, 1 / vocab_size, dtype=np.float32)
        drawn = sample([row() for _ in range(num_rows)], probs, sampler)
        assert len(drawn.logprobs) == num_rows
        assert drawn.logprobs == pytest.approx([-np.log(vocab_size)] * num_rows, abs=1e-6)
        assert int(drawn.token_ids_B.max()) < vocab_size


def test_the_noise_of_a_seed_and_a_choice_is_its_own() -> None:
    def draws(seed: int, index: int) -> list[float]:
        return choice_noise(seed, index).random(4).tolist()

    assert draws(1, 2) == draws(1, 2)
    assert len({tuple(draws(*key)) for key in ((1, 2), (2, 1), (1, 3), (2**63, 0), (0, 0), (1, 0), (-1, 0))}) == 7
    assert draws(-1, 0) == draws(2**64 - 1, 0)
    assert draws(2**64 + 5, 0) == draws(5, 0)


def test_a_row_without_a_seed_draws_as_the_first_choice_of_the_samplers_seed() -> None:
    sampler, mine = BatchSampler(CPU, seed=7), row(7)
    assert [int(sample([row()], sampler=sampler).token_ids_B[0]) for _ in range(12)] == [
        int(sample([mine]).token_ids_B[0]) for _ in range(12)
    ]


def test_of_equals_the_first_are_kept() -> None:
    assert support(np.full(1000, 1e-3, dtype=np.float32), top_k=3) == [0, 1, 2]


def test_the_memory_for_noise_is_kept_while_it_is_large_enough() -> None:
    sampler, memory = BatchSampler(CPU, seed=1), []
    for num_rows in (9, 9, 8, 3, 10, 18, 10):
        sample([row() for _ in range(num_rows)], sampler=sampler)
        memory.append((id(sampler._buffer), sampler._buffer.shape))
    assert memory[0] == memory[1] == memory[2] == memory[3]
    assert [shape for _, shape in memory[3:]] == [(9, 5), (18, 5), (18, 5), (18, 5)]
    assert memory[4] == memory[5] == memory[6]


def test_a_device_has_noise_of_its_own_from_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[tuple[str, int]] = []

    class Generator:
        def __init__(self, device: torch.device) -> None:
            self.device = device.type

        def manual_seed(self, seed: int) -> None:
            seeds.append((self.device, seed))

    monkeypatch.setattr(torch, "Generator", Generator)
    for seed in (5, 2**63 + 5):
        BatchSampler(torch.device("cuda"), seed)
    BatchSampler(CPU, 5)
    assert seeds == [("cuda", 5), ("cuda", 5)]


def test_alternatives_come_for_the_rows_that_ask_and_are_the_likeliest_in_order() -> None:
    drawn = sample([row(1), row(1, top=2), row(1, top=9, top_k=3)])
    assert sorted(drawn.top_logprobs) == [1, 2]
    assert [(one.token_id, one.logprob) for one in drawn.top_logprobs[1]] == [
        (0, pytest.approx(np.log(0.4), abs=1e-6)), (1, pytest.approx(np.log(0.3), abs=1e-6)),
    ]  # fmt: skip
    assert len(drawn.top_logprobs[2]) == 5, "no more than there are"
    assert [one.token_id for one in drawn.top_logprobs[2][:3]] == [0, 1, 2]
    assert drawn.top_logprobs[2][3].logprob == -np.inf


def test_an_exponential_of_zero_is_no_certain_win() -> None:
    class Zeros:
        """Draws the smallest there is for the unlikeliest token."""

        def standard_exponential(self, size: Any = None, dtype: Any = None, out: np.ndarray | None = None) -> None:
            assert out is not None
            out[...] = 1.0
            out[..., -1] = 0.0

    tiny = np.array([1.0, 0.0], dtype=np.float32)
    logits_BV = torch.from_numpy(np.log(np.maximum(tiny, 1e-44)))[None]
    sampled = BatchSampler(CPU, seed=0).sample(logits_BV, plan_of(Row(SamplingParams(), Zeros())))  # type: ignore[arg-type]
    assert sampled.token_ids_B.tolist() == [0]
