"""Adapters side by side: a row's bits do not tell who stands beside it, and a stack is made anew only when it must be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policies import make_model, save_adapter, tiny_config, with_adapter
from schedulers import ask, make_scheduler, sampled

from mettle.inference.engine import adapter_stacks
from mettle.inference.engine.adapter_files import read_adapter
from mettle.inference.engine.adapter_stacks import AdapterStacks, StackedRows
from mettle.inference.engine.adapters import AdapterRows, AdapterWeights, fit_adapter
from mettle.inference.engine.architecture import shape_from_config
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.scheduler import Scheduler

CPU = torch.device("cpu")
MODEL = make_model(tiny_config(hidden_size=96, intermediate_size=256, head_dim=32))
TARGETS: list[dict[str, Any]] = [
    {"rank": 4},
    {"rank": 20, "targets": ("q_proj", "down_proj")},
    {"rank": 8, "targets": ("o_proj", "gate_proj", "up_proj")},
    {"rank": 16},
    {"rank": 3, "targets": ("v_proj",)},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [save_adapter(MODEL, root / f"a{i}", seed=i, **changes) for i, changes in enumerate(TARGETS)]


@pytest.fixture(scope="module")
def weights(folders: list[Path]) -> list[AdapterWeights]:
    shape = shape_from_config(MODEL.config.to_dict())
    return [fit_adapter(shape, read_adapter(folder), CPU, torch.float32) for folder in folders]


def make(weights: list[AdapterWeights]) -> Scheduler:
    scheduler = make_scheduler(MODEL, max_slots=16)
    for number, one in enumerate(weights):
        scheduler.put_adapter(f"a{number}", Path(), 0, one)
    return scheduler


def test_rows_of_several_adapters_get_their_own_in_any_company(
    weights: list[AdapterWeights], folders: list[Path]
) -> None:
    asked = [replace(ask(f"r{i}", [3 + i, 7, 9, 11], 2, seed=i), adapter=f"a{i}") for i in range(len(weights))]
    asked.append(ask("base", [3, 7, 9, 11], 2, seed=9))
    together = [sampled(answer) for answer in run_requests(make(weights), asked)]
    for request, expected in zip(asked, together, strict=True):
        assert sampled(run_requests(make(weights), [request])[0]) == expected
    bare = make_scheduler(MODEL, max_slots=16)
    assert sampled(run_requests(bare, [asked[-1]])[0]) == together[-1]
    for number, choices in enumerate(together[:-1]):
        merged = with_adapter(MODEL, folders[number])
        for token_ids, logprobs in choices:
            ids = torch.tensor([[*asked[number].prompt_ids, *token_ids]])
            with torch.no_grad():
                found = torch.log_softmax(merged(ids).logits[0, 3:-1], -1)
            reference = found.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
            assert (reference - torch.tensor(logprobs)).abs().max() < 1e-4


def test_a_stack_serves_on_while_it_holds_what_is_wanted(weights: list[AdapterWeights]) -> None:
    if not adapter_stacks._keeps_bits(torch.float32, torch.get_num_threads()):
        pytest.skip("packed products do not keep the bits on this processor")
    stacks = AdapterStacks()

    def stack(*chosen: AdapterWeights | None) -> object:
        (rows,) = stacks.rows(chosen, CPU, torch.float32)
        assert isinstance(rows, StackedRows)
        return rows._stack

    assert stacks.rows([None, None], CPU, torch.float32) == []
    first = stack(*weights[:4], None)
    assert stack(weights[2], weights[0], weights[0]) is first
    assert stack(weights[2]) is not first, "three of its four adapters are not wanted any more"
    assert stack(weights[4], weights[2]) is not first
    kept = stack(weights[0])
    stacks.forget()
    assert stack(weights[0]) is not kept


def test_where_bits_are_not_kept_rows_are_grouped(
    weights: list[AdapterWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_stacks, "_keeps_bits", lambda *_: False)
    groups = AdapterStacks().rows([weights[0], None, weights[1], weights[0]], CPU, torch.float32)
    assert [type(group) for group in groups] == [AdapterRows, AdapterRows]
