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


def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where levels would not keep the bits."""
    monkeypatch.setattr(attention, "keeps_bits", lambda *_: False)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("cuts", [[160], [128, 224], [256], [32, 96, 256, 288], [352, 384]])
def test_far_into_a_prompt_it_may_be_cut_there_too(
    decoder: Decoder, cuts: list[int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(780).view(2, 390) * 7 % 250
    with torch.inference_mode():
        whole_kv, kv = decoder.prompt_room(2, 390), decoder.prompt_room(2, 390)
        whole = decoder.prefill(ids, whole_kv)
        with inference_threads(threads):
            parts = [decoder.prefill(ids[:, a:b], kv, a) for a, b in zip([0, *cuts], [*cuts, 390], strict=True)]
        assert torch.equal(torch.cat(parts, 1), whole)
        assert torch.equal(kv, whole_kv)
        assert torch.equal(torch.cat([decoder.prefill(own[None]) for own in ids]), whole)
        in_blocks(monkeypatch)
        expected = decoder.prefill(ids)
    assert not torch.equal(whole, expected)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_positions_may_be_cut_whatever_the_threads(threads: int) -> None:
    """More numbers than one thread computes, whose places among the threads change with the cut."""
    config = tiny_config(max_position_embeddings=1024, intermediate_size=160, num_hidden_layers=1)
    decoder = make_scheduler(make_model(config), max_model_len=1000).decoder
    ids = torch.arange(1000)[None] * 11 % 250
    with torch.inference_mode():
        whole = decoder.prefill(ids)
        with inference_threads(threads):
            kv = decoder.prompt_room(1, 1000)
            parts = [decoder.prefill(ids[:, :416], kv), decoder.prefill(ids[:, 416:], kv, 416)]
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("has_levels", [True, False])
@pytest.mark.parametrize(("start", "since"), [(0, 0), (0, 96), (0, 288), (0, 352), (128, 256), (320, 352), (64, 32)])
def test_rows_that_nobody_asked_for_change_nothing(
    decoder: Decoder, start: int, since: int, has_levels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_levels:
        in_blocks(monkeypatch)
    ids = torch.arange(780).view(2, 390) * 11 % 250
    with torch.inference_mode():
        whole_kv, kv = decoder.prompt_room(2, 390), decoder.prompt_room(2, 390)
        whole = decoder.prefill(ids, whole_kv)
        kv[:, :, :, :start] = whole_kv[:, :, :, :start]
        assert torch.equal(decoder.prefill(ids[:, start:], kv, start, since=since), whole[:, max(start, since) :])
        assert torch.equal(kv, whole_kv)
        assert torch.equal(decoder.prefill(ids[:, :100], since=96), whole[:, 96:100])


def test_of_a_part_before_what_is_asked_for_only_keys_and_values_are_computed(decoder: Decoder) -> None:
    ids = torch.arange(200)[None] * 11 % 250
    with torch.inference_mode():
        whole_kv, kv = decoder.prompt_room(1, 200), decoder.prompt_room(1, 200)
        whole = decoder.prefill(ids, whole_kv)
        assert decoder.prefill(ids[:, :160], kv, since=192).shape == (1, 0, 32)
        assert torch.equal(decoder.prefill(ids[:, 160:], kv, 160, since=192), whole[:, 192:])
    assert torch.equal(kv, whole_kv)


def test_a_prompt_is_taken_up_where_a_block_begins_only(decoder: Decoder) -> None:
    with pytest.raises(AssertionError, match="where a block begins"):
        decoder.prefill(torch.ones(1, 4, dtype=torch.long), decoder.prompt_room(1, 40), 5)
