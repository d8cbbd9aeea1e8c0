"""What a sample may ask of its prompt beyond the log-probability of each token: the likeliest tokens, those of given
ones, and draws. Computed by the trainer's network between two passes.

Parts: `PromptScores`. Invariant: row i of a result stands for the prompt's token i, and what precedes it alone decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mettle.errors import UserError
from mettle.trainer.service.bodies import SampleBody
from mettle.trainer.service.core import LoraCore
from mettle.trainer.service.folders import WeightFolders
from mettle.trainer.service.wire.answers import SampleAnswer
from mettle.trainer.service.wire.tensors import read_json_tensor
from mettle.trainer.service.worker import TrainingWorker


class PromptScores:
    """Asks the training thread."""

    def __init__(self, core: LoraCore, worker: TrainingWorker, weights: WeightFolders) -> None:
        self._core, self._worker, self._weights = core, worker, weights

    async def added_to(
        self, answer: SampleAnswer, folder: str, prompt: Sequence[int], body: SampleBody
    ) -> SampleAnswer:
        """The answer with what was asked for. Raises: UserError."""
        wanted = None
        if body.target_prompt_logprobs is not None:
            wanted = read_json_tensor(body.target_prompt_logprobs, "target_prompt_logprobs")
            self._check_targets(wanted, len(prompt))

        def score() -> SampleAnswer:
            path = self._weights.path(folder) if folder else None
            return _filled(answer, self._core.score(path, prompt)[:-1], body, wanted)

        return await asyncio.wrap_future(self._worker.call(score))

    def _check_targets(self, wanted: np.ndarray, num_tokens: int) -> None:
        if wanted.ndim != 2 or len(wanted) != num_tokens - 1 or wanted.dtype.kind != "i":
            raise UserError(f"target_prompt_logprobs: int64 of shape [{num_tokens - 1}, K] is needed")
        if wanted.size and (wanted.min() < -1 or wanted.max() >= self._core.vocab_size):
            raise UserError(f"target_prompt_logprobs: ids go from -1 to {self._core.vocab_size - 1}")


def _filled(answer: SampleAnswer, logprobs_PV: Tensor, body: SampleBody, wanted: np.ndarray | None) -> SampleAnswer:
    """`logprobs_PV` has a row for each token of the prompt but the first."""
    changes: dict[str, object] = {}
    if body.topk_prompt_logprobs:
        count = min(body.topk_prompt_logprobs, logprobs_PV.shape[1])
        values, ids = logprobs_PV.topk(count)
        rows = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
        first = 0 if body.prompt_logprobs_last_n is None else max(0, len(rows) - body.prompt_logprobs_last_n)
        changes["prompt_alternatives"] = [None, *[None] * first, *rows[first:]]
        changes["num_alternatives"] = count
    if wanted is not None:
        ids_PK = torch.from_numpy(np.ascontiguousarray(wanted))
        found = logprobs_PV.gather(1, ids_PK.clamp(min=0)).masked_fill(ids_PK < 0, 0.0)
        changes["target_logprobs"] = found.numpy()
    if body.prompt_alt_tokens_k:
        temperature = max(body.sampling_params.temperature, 1e-5)
        seed = body.sampling_params.seed
        generator = torch.Generator().manual_seed(seed) if seed is not None else None
        probs_PV = (logprobs_PV / temperature).softmax(-1)
        drawn = torch.multinomial(probs_PV, body.prompt_alt_tokens_k, replacement=True, generator=generator)
        changes["drawn"] = (drawn.numpy(), logprobs_PV.gather(1, drawn).numpy())
    return replace(answer, **changes)  # type: ignore[arg-type]
