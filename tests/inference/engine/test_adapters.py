"""Adapters in the decoder: what PEFT computes, on each adapter's own rows and nobody else's."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import CONFIGS
from policies import ALL_LINEAR, make_model, picked_logprobs, save_adapter, tiny_config, with_adapter
from schedulers import Heard, ask, make_scheduler, sampled
from torch import Tensor

from mettle.errors import UserError
from mettle.inference.engine.adapter_files import read_adapter
from mettle.inference.engine.adapters import AdapterWeights, NotByRow, fit_adapter, head_rows
from mettle.inference.engine.architecture import shape_from_config
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import GenerationRequest, RequestRefused
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.engine.weights import fuse

CPU = torch.device("cpu")
IDS = [5, 17, 200, 3, 3, 91, 44, 8, 120, 7, 66]
NOT_TIED = {name: () if config.tie_word_embeddings else ("lm_head",) for name, config in CONFIGS.items()}
"""The output head, where it is a matrix of its own."""
FAMILIES = ("qwen3 tied", "llama with biases", "olmo2", "gemma3 with a cap and stretched positions")


def make_decoder(model: Any, max_length: int = 64) -> Decoder:
    shape = shape_from_config(model.config.to_dict())
    return Decoder(shape, fuse(shape, model.state_dict(), CPU, torch.float32), max_length)


def fitted(model: Any, folder: Path) -> AdapterWeights:
    return fit_adapter(shape_from_config(model.config.to_dict()), read_adapter(folder), CPU, torch.float32)


def logprobs(decoder: Decoder, adapter: AdapterWeights | None) -> Tensor:
    hidden = decoder.prefill(torch.tensor([IDS]), adapters=[adapter])[0, : len(IDS)]
    return torch.log_softmax(decoder.logits(hidden, head_rows([adapter], CPU, len(IDS))), -1)


def references(model: Any) -> Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([IDS])).logits[0].float(), -1)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_gives_what_its_merged_weights_do(name: str, tmp_path: Path) -> None:
    model = make_model(CONFIGS[name])
    folder = save_adapter(model, tmp_path / "a")
    ours = logprobs(make_decoder(model), fitted(model, folder))
    assert (ours - references(with_adapter(model, folder))).abs().mean() <= 1e-5
    assert (ours - references(model)).abs().mean() > 0.01


@pytest.mark.parametrize(
    "targets", [("q_proj", "v_proj"), ("down_proj",), ("k_proj", "gate_proj", "o_proj"), ALL_LINEAR]
)
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "rank": 9}])
def test_logprobs_agree_with_peft(targets: tuple[str, ...], settings: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = make_model(tiny_config())
    folder = save_adapter(model, tmp_path / "a", targets=targets, **settings)
    ours = logprobs(make_decoder(model), fitted(model, folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for a name that it has just replaced
        reference = peft.PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).eval()
    assert (ours - references(reference)).abs().mean() <= 1e-5


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_rows_of_several_adapters_get_the_bits_that_each_gets_alone(rank: int, tmp_path: Path) -> None:
    model = make_model(tiny_config())
    decoder = make_decoder(model)
    one, other = (fitted(model, save_adapter(model, tmp_path / str(i), seed=i, rank=rank + i)) for i in range(2))
    company = [one, None, other, one, None, *[other] * 9]
    together = decoder.prefill(torch.tensor([IDS] * len(company)), adapters=company)
    for row, adapter in enumerate(company):
        assert torch.equal(together[row], decoder.prefill(torch.tensor([IDS]), adapters=[adapter])[0])
    assert torch.equal(together[1], decoder.prefill(torch.tensor([IDS]))[0])


def scheduler_with(model: Any, folders: Mapping[str, Path], **more: Any) -> Scheduler:
    scheduler = make_scheduler(model, **more)
    for name, folder in folders.items():
        scheduler.put_adapter(name, folder, 0, fitted(model, folder))
    return scheduler


def ask_as(adapter: str, number: int, prompt: list[int], version: int | None = None, n: int = 1) -> GenerationRequest:
    asked = ask(f"{adapter}-{number}", prompt, n, seed=number, max_tokens=20, ignore_eos=True)
    return replace(asked, adapter=adapter, adapter_version=version)


@pytest.mark.parametrize("name", ["qwen3 tied", "qwen3_moe", "llama with biases"])
def test_requests_of_several_adapters_are_sampled_as_each_would_be_alone(name: str, tmp_path: Path) -> None:
    model = make_model(CONFIGS[name])
    of_each = [ALL_LINEAR[4:], (*ALL_LINEAR, *NOT_TIED[name]), (*ALL_LINEAR[:4], *NOT_TIED[name])]
    folders = {
        str(i): save_adapter(model, tmp_path / str(i), seed=i, rank=1 + i, targets=targets)
        for i, targets in enumerate(of_each)
    }
    wanted = [ask_as(adapter, i, IDS, n=1 + i % 2) for i, adapter in enumerate(["0", "", "1", "0", "2", "", "1", "0"])]
    together = run_requests(scheduler_with(model, folders, max_slots=64), wanted)
    for request, generation in zip(wanted, together, strict=True):
        (alone,) = run_requests(scheduler_with(model, folders, max_slots=64), [request])
        assert sampled(alone) == sampled(generation)
        merged = with_adapter(model, folders[request.adapter]) if request.adapter else model
        for choice in generation.choices:
            expected = picked_logprobs(merged, [*IDS, *choice.token_ids])[len(IDS) - 1 :]
            assert (expected - torch.tensor(choice.logprobs)).abs().mean() <= 1e-5


def test_a_prefix_that_one_adapter_computed_is_never_anothers(tmp_path: Path) -> None:
    model = make_model(tiny_config())
    folders = {str(i): save_adapter(model, tmp_path / str(i), seed=i) for i in range(2)}
    prompt = [9, 8, 7] * 30
    scheduler = scheduler_with(model, folders)
    for adapter in ("0", "1", "", "0"):
        (generation,) = run_requests(scheduler, [ask_as(adapter, 1, prompt)])
        (fresh,) = run_requests(scheduler_with(model, folders), [ask_as(adapter, 1, prompt)])
        assert sampled(generation) == sampled(fresh)
    assert scheduler.totals.prefix_hit_tokens == 64
    scheduler.put_adapter("0", folders["1"], 0, fitted(model, folders["1"]))
    (generation,) = run_requests(scheduler, [ask_as("0", 1, prompt)])
    (fresh,) = run_requests(scheduler_with(model, folders), [ask_as("1", 1, prompt)])
    assert sampled(generation) == sampled(fresh)


def test_a_new_version_is_taken_by_running_requests_except_those_that_pinned_theirs(tmp_path: Path) -> None:
    model = make_model(tiny_config())
    old, new = (save_adapter(model, tmp_path / str(i), seed=i) for i in range(2))
    scheduler, heard = scheduler_with(model, {"a": old}), Heard()
    (alone,) = run_requests(scheduler_with(model, {"a": old}), [ask_as("a", 2, IDS)])
    for request in (ask_as("a", 1, IDS), ask_as("a", 2, IDS, version=0), ask_as("", 3, IDS)):
        scheduler.add(request, heard)
    for _ in range(6):
        scheduler.step()
    scheduler.put_adapter("a", new, 1, fitted(model, new))
    scheduler.remove_adapter("a")
    while scheduler.step():
        pass
    found = {generation.request_id: generation for generation in heard.generations}
    versions = found["a-1"].choices[0].versions
    assert versions == [0] * versions.count(0) + [1] * versions.count(1)
    assert 0 < versions.count(0) < 20
    assert found["a-2"].choices[0].versions == [0] * 20
    assert sampled(found["a-2"]) == sampled(alone)
    assert found["-3"].choices[0].versions == [0] * 20
    with pytest.raises(RequestRefused, match="'a' is not served"):
        scheduler.check(ask_as("a", 4, IDS))
    scheduler.add(ask_as("a", 4, IDS), heard)  # it was there when the request was checked
    assert [str(error) for error in heard.errors] == ["adapter 'a' is not served"]


@pytest.mark.parametrize(
    "targets", [ALL_LINEAR[:4], ("gate_proj", "up_proj"), ("down_proj",), (*ALL_LINEAR, "lm_head")]
)
def test_an_adapter_of_a_mixture_gives_what_its_merged_weights_do(targets: tuple[str, ...], tmp_path: Path) -> None:
    model = make_model(CONFIGS["qwen3_moe"])
    folder = save_adapter(model, tmp_path / "a", targets=targets)
    ours = logprobs(make_decoder(model), fitted(model, folder))
    assert (ours - references(with_adapter(model, folder))).abs().mean() <= 1e-5
    assert (ours - references(model)).abs().mean() > 0.01


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_adapter_of_the_output_head_gives_what_peft_computes(is_tied: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = make_model(tiny_config(tie_word_embeddings=is_tied))
    folder = save_adapter(model, tmp_path / "a", targets=("v_proj", "lm_head"))
    ours = logprobs(make_decoder(model), fitted(model, folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of a head that is tied
        reference = peft.PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).eval()
    assert (ours - references(reference)).abs().mean() <= 1e-5


def test_tokens_under_adapters_of_experts_and_head_are_drawn_as_their_merged_models_say(tmp_path: Path) -> None:
    model = make_model(CONFIGS["qwen3_moe"])
    folders = {
        str(i): save_adapter(model, tmp_path / str(i), seed=i, targets=(*ALL_LINEAR, "lm_head")) for i in range(2)
    }
    wanted = [replace(ask(name, IDS, 2000, seed=5, max_tokens=1, ignore_eos=True), adapter=name) for name in folders]
    for name, generation in zip(
        folders, run_requests(scheduler_with(model, folders, max_slots=4096), wanted), strict=True
    ):
        expected = references(with_adapter(model, folders[name]))[-1].exp() * 2000
        counts = torch.bincount(torch.tensor([c.token_ids[0] for c in generation.choices]), minlength=len(expected))
        likely = expected >= 5
        counted = torch.cat([counts[likely], counts[~likely].sum()[None]])
        wanted_counts = torch.cat([expected[likely], expected[~likely].sum()[None]])
        statistic = ((counted - wanted_counts) ** 2 / wanted_counts).sum()
        degrees = len(counted) - 1
        assert degrees >= 5
        assert statistic < degrees + 4 * (2 * degrees) ** 0.5, "four standard deviations"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 0}, "rank"),
        ({"r": "many"}, "cannot be read"),
        ({"r": 5}, "rank"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_an_adapter_that_is_more_than_plain_lora_is_refused_in_one_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_model(tiny_config())
    folder = save_adapter(model, tmp_path / "a", **change)
    with pytest.raises(UserError, match=message) as caught:
        fitted(model, folder)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_base_is_refused_in_one_line(tmp_path: Path) -> None:
    model = make_model(tiny_config())
    others = {
        "is \\[64, 32\\] here, \\[48, 32\\] there": (tiny_config(intermediate_size=48), ALL_LINEAR),
        "no 'model.layers.2": (tiny_config(num_hidden_layers=3), ALL_LINEAR),
        "at all": (tiny_config(), ()),
    }
    for number, (message, (config, targets)) in enumerate(others.items()):
        folder = save_adapter(make_model(config), tmp_path / str(number), targets=targets)
        with pytest.raises(UserError, match=message) as caught:
            fitted(model, folder)
        assert "\n" not in str(caught.value)


def test_an_adapter_of_a_router_is_refused_by_row(tmp_path: Path) -> None:
    model = make_model(CONFIGS["qwen3_moe"])
    with pytest.raises(NotByRow, match="a mixture's routers are not served"):
        fitted(model, save_adapter(model, tmp_path / "a", targets=("q_proj", "gate")))


def test_an_adapter_of_a_dense_model_is_refused_on_a_mixture_by_name(tmp_path: Path) -> None:
    model = make_model(CONFIGS["qwen3_moe"])
    folder = save_adapter(make_model(tiny_config(hidden_size=32)), tmp_path / "a", targets=("gate_proj",))
    with pytest.raises(UserError, match=r"has no 'model\.layers\.0\.mlp\.gate_proj'"):
        fitted(model, folder)


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    model = make_model(tiny_config())
    with pytest.raises(UserError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)
    folder = save_adapter(model, tmp_path / "a")
    (folder / "adapter_model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="cannot be read"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text(json.dumps(["r"]))
    with pytest.raises(UserError, match="cannot be read"):
        read_adapter(folder)
