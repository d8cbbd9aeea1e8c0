"""Does the engine serve what the trainer published? The canary's log-probabilities tell.

A stale or wrong copy of one matrix raises no error anywhere: text still comes out. The trainer therefore publishes a
few token sequences with its own log-probabilities, and an engine must reproduce them under the weights that it is about
to serve. Between fp32 sides the mean difference is about 1e-7; a stale head shows .1 and more.
"""

from __future__ import annotations

import numpy as np
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
    differences = _differences(decoder, canary, adapter)
    if not len(differences):
        raise WeightsRejected(f"the canary of version {version} holds no tokens to compare")
    mean, largest = float(differences.mean()), float(differences.max())
    check = CanaryCheck(version, mean, largest, len(differences))
    if not mean <= tolerance:
        message = (
            f"version {version} is not served: log-probabilities differ from the trainer's by {mean:.3g} in the mean "
            f"({largest:.3g} at most) over {check.num_tokens} canary tokens, more than the {tolerance:g} allowed"
        )
        raise WeightsRejected(message, check)
    return check


def _differences(decoder: Decoder, canary: Canary, adapter: AdapterWeights | None) -> torch.Tensor:
    """Of all tokens that something predicts. The sequences are computed together, as long as the longest: what stands
    behind one's end is not looked at."""
    chosen = np.flatnonzero(canary.lengths >= 2)
    if not len(chosen):
        return torch.zeros(0, dtype=torch.float64)
    lengths = canary.lengths[chosen].astype(np.int64)
    columns = np.arange(int(lengths.max()))
    token_ids_NP = np.where(columns < lengths[:, None], canary.token_ids[chosen, : len(columns)], 0).astype(np.int64)
    if int(token_ids_NP.min()) < 0 or int(token_ids_NP.max()) >= decoder.shape.vocab_size:
        raise WeightsRejected(f"the canary holds token ids outside the vocabulary of {decoder.shape.vocab_size}")
    hidden_NPD = decoder.prefill(torch.from_numpy(token_ids_NP).to(decoder.device), adapters=[adapter] * len(chosen))
    rows, places = np.nonzero(columns[1:] < lengths[:, None])  # of the tokens behind the first, from the second on
    targets = torch.from_numpy(token_ids_NP[rows, places + 1]).to(decoder.device)
    before = hidden_NPD[torch.from_numpy(rows), torch.from_numpy(places)]
    ours = score_tokens(decoder, targets, before, adapter).cpu().double()
    theirs = torch.from_numpy(canary.logprobs[chosen[rows], places + 1].astype("float64"))
    return (ours - theirs).abs()
