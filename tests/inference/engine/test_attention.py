"""What a position gets hangs on the positions before it alone, whatever the number of threads and of neighbours."""

from __future__ import annotations

import pytest
import torch
from policies import make_model, tiny_config
from schedulers import make_scheduler

from mettle.inference.engine import attention
from mettle.inference.engine.attention import Span
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.weights import inference_threads

CONFIGS = {
    "two queries of a kv head": tiny_config(max_position_embeddings=512),
    "four queries of a kv head": tiny_config(num_key_value_heads=1, max_position_embeddings=512),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return make_scheduler(make_model(CONFIGS[request.param]), max_model_len=400).decoder


def step(decoder: Decoder, kv: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """One more token of each sequence, whose keys and values are not changed for the next call."""
    positions = torch.tensor(lengths) - 1
    with torch.inference_mode():
        return decoder.decode(positions % 256, positions, [Span(kv.clone(), lengths)])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neighbours_and_threads_change_nothing(decoder: Decoder, threads: int) -> None:
    kv = torch.randn(20, *decoder.prompt_room(1, 256).shape[1:], generator=torch.Generator().manual_seed(0))
    lengths = [1 + 13 * i for i in range(20)]
    alone = torch.cat([step(decoder, kv[i : i + 1], lengths[i : i + 1]) for i in range(20)])
    with inference_threads(threads):
        for count in (1, 3, 8, 9, 10, 11, 12, 20):
            assert torch.equal(step(decoder, kv[:count], lengths[:count]), alone[:count])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cuts", [[32], [64, 96], [32, 64, 96, 128, 160]])
def test_a_prompt_may_be_cut_where_a_block_begins(decoder: Decoder, cuts: list[int], threads: int) -> None:
    ids = torch.arange(170)[None] % 250
    with torch.inference_mode():
        whole_kv, kv = decoder.prompt_room(1, 170), decoder.prompt_room(1, 170)
        whole = decoder.prefill(ids, whole_kv)
        with inference_threads(threads):
            parts = [decoder.prefill(ids[:, a:b], kv, a) for a, b in zip([0, *cuts], [*cuts, 170], strict=True)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(kv, whole_kv)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cuts", [[160], [128, 224], [32, 96, 256, 288]])
def test_far_into_a_prompt_it_may_be_cut_there_too(
    decoder: Decoder, cuts: list[int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(600).view(2, 300) * 7 % 250
    with torch.inference_mode():
        expected = decoder.prefill(ids)
        monkeypatch.setattr(attention, "FAR", 128)
        whole_kv, kv = decoder.prompt_room(2, 300), decoder.prompt_room(2, 300)
        whole = decoder.prefill(ids, whole_kv)
        with inference_threads(threads):
            parts = [decoder.prefill(ids[:, a:b], kv, a) for a, b in zip([0, *cuts], [*cuts, 300], strict=True)]
    assert torch.equal(whole[:, :128], expected[:, :128])
    assert not torch.equal(whole, expected)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=5e-5)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(kv, whole_kv)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cuts", [[224, 320], [288], [256, 352, 384]])
def test_where_blocks_are_widest_a_cut_changes_nothing(
    decoder: Decoder, cuts: list[int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(390)[None] * 11 % 250
    with torch.inference_mode():
        expected = decoder.prefill(ids)
        for name, value in (("FAR", 128), ("WIDE_TILE", 256), ("FARTHER", 256)):
            monkeypatch.setattr(attention, name, value)
        whole_kv, kv = decoder.prompt_room(1, 390), decoder.prompt_room(1, 390)
        whole = decoder.prefill(ids, whole_kv)
        with inference_threads(threads):
            parts = [decoder.prefill(ids[:, a:b], kv, a) for a, b in zip([0, *cuts], [*cuts, 390], strict=True)]
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=5e-5)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(kv, whole_kv)


@pytest.mark.parametrize("keeps_bits", [True, False])
def test_rows_that_nobody_asked_for_change_nothing(
    decoder: Decoder, keeps_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(390)[None] * 11 % 250
    with torch.inference_mode():
        for name, value in (("FAR", 128), ("WIDE_TILE", 256), ("FARTHER", 256)):
            monkeypatch.setattr(attention, name, value)
        kv = decoder.prompt_room(1, 390)
        whole = decoder.prefill(ids, kv)
        monkeypatch.setattr(attention, "_keeps_bits", lambda *_: keeps_bits)
        monkeypatch.setattr(attention, "_begins_alike", lambda *_: keeps_bits)
        assert torch.equal(decoder.prefill(ids[:, 320:], kv, 320), whole[:, 320:])
        assert torch.equal(decoder.prefill(ids[:, :100]), whole[:, :100])


def test_a_prompt_is_taken_up_where_a_block_begins_only(decoder: Decoder) -> None:
    with pytest.raises(AssertionError, match="where a block begins"):
        decoder.prefill(torch.ones(1, 4, dtype=torch.long), decoder.prompt_room(1, 40), 5)
