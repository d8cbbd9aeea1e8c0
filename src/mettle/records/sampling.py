"""How tokens are drawn: the sampling parameters that every engine and client understands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling. Logprobs that come back are those of the distribution sampled from ("processed").

    `temperature` 0 is greedy. `top_p` 1, `top_k` -1 and `min_p` 0 leave the support whole, which training demands.
    `seed` makes a request repeatable; choice i of n draws from (seed, i).
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def is_truncating(self) -> bool:
        """True when the support is cut, so that the logprobs are no longer the policy's own."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0
