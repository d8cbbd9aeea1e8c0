"""Does the engine serve what the trainer published? The canary's log-probabilities tell.

A stale or wrong copy of one matrix raises no error anywhere: text still comes out. The trainer therefore publishes a
few token sequences with its own log-probabilities, and an engine must reproduce them under the weights that it is about
to serve. Between fp32 sides the mean difference is about 1e-7; a stale head shows .1 and more.
"""

from __future__ import annotations

import torch

from mettle.inference.engine.adapters import AdapterWeights
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.prompts import score_tokens
from mettle.inference.engine.protocol import WeightsRejected
from mettle.records.versions import CanaryCheck
from mettle.storage.weights import Canary


@torch.inference_mode()
def check_canary(
    decoder: Decoder, canary: Canary, version: int, tolerance: float, adapter: AdapterWeights | None = None
) -> CanaryCheck:
    """Compare, under an adapter if there is one; the check that is returned passed.

    Raises: WeightsRejected when the mean difference is above `tolerance` or not a number, or nothing was compared.
    """
    differences = [_differences(decoder, canary, row, adapter) for row in range(len(canary.lengths))]
    all_differences = torch.cat(differences) if differences else torch.zeros(0)
    if not len(all_differences):
        raise WeightsRejected(f"the canary of version {version} holds no tokens to compare")
    mean, largest = float(all_differences.mean()), float(all_differences.max())
    check = CanaryCheck(version, mean, largest, len(all_differences))
    if not mean <= tolerance:
        message = (
            f"version {version} is not served: log-probabilities differ from the trainer's by {mean:.3g} in the mean "
            f"({largest:.3g} at most) over {check.num_tokens} canary tokens, more than the {tolerance:g} allowed"
        )
        raise WeightsRejected(message, check)
    return check


def _differences(decoder: Decoder, canary: Canary, row: int, adapter: AdapterWeights | None) -> torch.Tensor:
    length = int(canary.lengths[row])
    ids = torch.from_numpy(canary.token_ids[row, :length].astype("int64")).to(decoder.device)
    if length < 2:
        return torch.zeros(0, dtype=torch.float64)
    if int(ids.min()) < 0 or int(ids.max()) >= decoder.shape.vocab_size:
        raise WeightsRejected(f"the canary holds token ids outside the vocabulary of {decoder.shape.vocab_size}")
    hidden_PD = decoder.prefill(ids[None], adapters=[adapter])[0]
    ours = score_tokens(decoder, ids[1:], hidden_PD, adapter).cpu().double()
    theirs = torch.from_numpy(canary.logprobs[row, 1:length].astype("float64"))
    return (ours - theirs).abs()
