"""Surrogates that the RL loop's losses and the training service's have in common. No torch when it is imported.

A surrogate is what is to be made large, a token each, before weights. Bounds are of the ratio itself. Parts:
`clipped_gain` (PPO's), `weighted_logprob` (a ratio that only weighs), `as_token_ratio` (a sequence's ratio with the
gradient of each token), `sequence_sum` and `sequence_mean`. Legend: K tokens of one pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def clipped_gain(ratio_K: Tensor, advantages_K: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, low, high) A), and True where the clip holds the token back. Source: PPO, arXiv 1707.06347."""
    gain_K = ratio_K * advantages_K
    clipped_K = ratio_K.clamp(low, high) * advantages_K
    return gain_K.minimum(clipped_K), clipped_K < gain_K


def weighted_logprob(weight_K: Tensor, advantages_K: Tensor, logprobs_K: Tensor) -> Tensor:
    """sg(weight) A l: the ratio weighs the gradient and has none itself. Source: CISPO, arXiv 2506.13585."""
    return weight_K.detach() * advantages_K * logprobs_K


def as_token_ratio(log_ratio_K: Tensor, logprobs_K: Tensor) -> Tensor:
    """exp of a sequence's log-ratio, with the gradient of the token's own l. Source: GSPO-token, arXiv 2507.18071."""
    return (log_ratio_K.detach() + logprobs_K - logprobs_K.detach()).exp()


def sequence_sum(values_K: Tensor, is_chosen_K: Tensor, sequence_K: Tensor) -> Tensor:
    """[K]: for each token the sum of `values_K` over the chosen tokens of its sequence."""
    # K places are enough for the sums, for each sequence of a pass has a target; so no size is asked of a GPU.
    kept_K = values_K.masked_fill(~is_chosen_K, 0.0)
    return values_K.new_zeros(len(values_K)).index_add(0, sequence_K, kept_K)[sequence_K]


def sequence_mean(values_K: Tensor, is_chosen_K: Tensor, sequence_K: Tensor) -> Tensor:
    """[K]: for each token the mean of `values_K` over the chosen tokens of its sequence; 0 where there are none."""
    counts_K = sequence_sum(is_chosen_K.to(values_K.dtype), is_chosen_K, sequence_K)
    return sequence_sum(values_K, is_chosen_K, sequence_K) / counts_K.clamp(min=1.0)
