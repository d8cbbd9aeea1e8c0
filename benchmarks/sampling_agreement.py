"""Does the engine sample what transformers computes, in every family and in every way to draw?

For each family a tiny model with random weights: whether greedy tokens are transformers' own, the mean difference of
their log-probabilities, and the chi-square test of so many first tokens against transformers' probabilities. Then one
model and the ways to draw, each against the distribution worked out here from transformers' logits.

    PYTHONPATH=src:tests/inference OMP_NUM_THREADS=1 python benchmarks/sampling_agreement.py [--draws N]

The numbers that matter are "no" in greedy, a difference above 1e-5, and p-values near 0: of n fair ones the least is
about 1/n.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from model_families import CONFIGS
from policies import END, make_model, reference_logprobs, save_tokenizer
from schedulers import ask, make_scheduler
from torch import Tensor

from mettle.inference.engine.grammars import Grammars
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.scheduler import Scheduler
from mettle.records.sampling import Constraint

PROMPT = [5, 17, 200, 3, 3, 91, 44, 8, 120, 7, 66]
NEW, SLOTS = 24, 250
BIAS = ((3, 2.5), (40, -4.0), (250, 1.0))


def top_k(logits: Tensor, k: int) -> Tensor:
    return logits.masked_fill(logits < logits.topk(k).values[-1], -torch.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    values, order = logits.sort(descending=True)
    before = values.softmax(0).cumsum(0) - values.softmax(0)
    return logits.clone().index_fill(0, order[before >= p], -torch.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    return logits.masked_fill(logits.softmax(0) < p * logits.softmax(0).max(), -torch.inf)


def repeated(logits: Tensor, penalty: float) -> Tensor:
    seen = torch.tensor(sorted(set(PROMPT)))
    there = logits[seen]
    return logits.index_copy(0, seen, torch.where(there > 0, there / penalty, there * penalty))


def biased(logits: Tensor) -> Tensor:
    return logits.index_add(0, torch.tensor([i for i, _ in BIAS]), torch.tensor([value for _, value in BIAS]))


def digits_only(logits: Tensor) -> Tensor:
    is_digit = torch.zeros(len(logits), dtype=torch.bool)
    is_digit[48:58] = True
    return logits.masked_fill(~is_digit, -torch.inf)


WAYS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "as it is": ({}, lambda x: x),
    "temperature .7": ({"temperature": 0.7}, lambda x: x / 0.7),
    "temperature 1.6": ({"temperature": 1.6}, lambda x: x / 1.6),
    "top_k 8": ({"top_k": 8}, lambda x: top_k(x, 8)),
    "top_p .8": ({"top_p": 0.8}, lambda x: top_p(x, 0.8)),
    "min_p .1": ({"min_p": 0.1}, lambda x: min_p(x, 0.1)),
    "top_k 20, top_p .9, temperature 1.3": (
        {"top_k": 20, "top_p": 0.9, "temperature": 1.3},
        lambda x: top_p(top_k(x / 1.3, 20), 0.9),
    ),
    "repetition penalty 1.8": ({"repetition_penalty": 1.8}, lambda x: repeated(x, 1.8)),
    "logit bias": ({"logit_bias": BIAS}, biased),
    "a grammar of digits": ({"constraint": Constraint("regex", "[0-9]{4}")}, digits_only),
}


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Of Pearson's chi-square; what is expected less than five times is one cell."""
    expected = probs.double() * counts.sum()
    is_rare = expected < 5
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    observed = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]]).double()
    wanted = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64), statistic / 2))


def drawn(scheduler: Scheduler, vocab_size: int, draws: int, **params: Any) -> Tensor:
    """How often each token came first."""
    counts = torch.zeros(vocab_size)
    for number in range(0, draws, SLOTS):
        (answer,) = run_requests(scheduler, [ask(str(number), PROMPT, SLOTS, max_tokens=1, **params)])
        counts += torch.bincount(torch.tensor([c.token_ids[0] for c in answer.choices]), minlength=vocab_size)
    return counts


def family(name: str, draws: int) -> tuple[bool, float, float]:
    model = make_model(CONFIGS[name])
    scheduler = make_scheduler(model, max_slots=SLOTS)
    (answer,) = run_requests(scheduler, [ask("greedy", PROMPT, max_tokens=NEW, temperature=0.0, ignore_eos=True)])
    choice = answer.choices[0]
    reference_TV = reference_logprobs(model, [*PROMPT, *choice.token_ids])[len(PROMPT) - 1 :]
    tokens = torch.tensor(choice.token_ids)
    ours = torch.tensor(choice.logprobs)
    difference = float((reference_TV.gather(1, tokens[:, None])[:, 0] - ours).abs().mean())
    is_equal = bool((reference_TV.argmax(-1) == tokens).all())
    return is_equal, difference, p_value(drawn(scheduler, reference_TV.shape[1], draws), reference_TV[0].exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=4000, help="first tokens of each test")
    draws = parser.parse_args().draws
    torch.set_num_threads(1)
    found = {name: family(name, draws) for name in CONFIGS}
    for name, (is_equal, difference, p) in found.items():
        sys.stdout.write(
            f"{name}: greedy equal {'yes' if is_equal else 'no'}, mean difference {difference:.1e}, p {p:.2f}\n"
        )
    model = make_model(CONFIGS["qwen3 tied"])
    logits_V = reference_logprobs(model, [*PROMPT, 0])[-1]
    ways = []
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        grammars = Grammars(Path(folder) / "tokenizer.json", len(logits_V), [END])
        scheduler = make_scheduler(model, max_slots=SLOTS, grammars=grammars)
        for name, (params, reference) in WAYS.items():
            counts = drawn(scheduler, len(logits_V), draws, **params)
            ways.append(p_value(counts, reference(logits_V).softmax(0)))
            sys.stdout.write(f"{name}: p {ways[-1]:.2f}\n")
    ps = [p for _, _, p in found.values()]
    sys.stdout.write(
        f"{len(found)} models: {sum(equal for equal, _, _ in found.values())} greedy-equal, mean difference at most "
        f"{max(d for _, d, _ in found.values()):.1e}, p {min(ps):.2f} to {max(ps):.2f}; "
        f"{len(ways)} ways to draw: p {min(ways):.2f} to {max(ways):.2f}; {draws} draws each\n"
    )


if __name__ == "__main__":
    main()
