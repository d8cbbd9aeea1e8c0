"""Updates of the embedded engine: a run's adapter beside the base, whole weights in its place."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import CONFIGS
from policies import (
    make_model,
    picked_logprobs,
    publish,
    publish_adapter,
    save_adapter,
    save_policy,
    tiny_config,
    with_adapter,
)
from pydantic import ValidationError
from schedulers import Heard, ask

from mettle.errors import MettleError, UserError
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.embedded import EmbeddedEngine, start_engine
from mettle.inference.engine.protocol import Generation, GenerationRequest, WeightsRejected
from mettle.records.sampling import SamplingParams

PROMPT = [5, 17, 200, 3, 3, 91, 44, 8, 120, 7, 66]


class Finished(Heard):
    """A listener that says when it has heard of the end of so many requests."""

    def __init__(self, num_requests: int) -> None:
        super().__init__()
        self.all_done = threading.Event()
        self._num_left = num_requests

    def on_finish(self, generation: Generation) -> None:
        super().on_finish(generation)
        self._count()

    def on_failure(self, error: MettleError) -> None:
        super().on_failure(error)
        self._count()

    def _count(self) -> None:
        self._num_left -= 1
        if not self._num_left:
            self.all_done.set()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_policy(make_model(tiny_config()), tmp_path / "base")


@pytest.fixture
def engine(base: Path) -> Iterator[EmbeddedEngine]:
    engine = start_engine(InferenceConfig(model=base, max_slots=8, seed=1))
    yield engine
    engine.close()


def adapter_version(base: Path, root: Path, version: int, **changes: Any) -> Path:
    model = make_model(tiny_config())
    folder = save_adapter(model, root / f"peft-{version}", seed=version)
    return publish_adapter(model, folder, base, root / "weights", version, **changes)


def scores(engine: EmbeddedEngine, adapter: str = "") -> torch.Tensor:
    params = SamplingParams(max_tokens=0)
    (generation,) = answers(engine, GenerationRequest("s", PROMPT, params, prompt_logprobs=True, adapter=adapter))
    assert generation.prompt_logprobs is not None
    return torch.tensor(generation.prompt_logprobs[1:])


def answers(engine: EmbeddedEngine, *requests: GenerationRequest) -> list[Generation]:
    heard = Finished(len(requests))
    for request in requests:
        engine.submit(request, heard)
    assert heard.all_done.wait(60), "the engine has answered"
    assert not heard.errors
    return heard.generations


def test_an_adapter_as_an_update_leaves_the_base_in_place_and_is_what_rows_get(
    engine: EmbeddedEngine, base: Path, tmp_path: Path
) -> None:
    decoder = engine._scheduler.decoder
    for version in (1, 2):
        folder = adapter_version(base, tmp_path, version)
        update = engine.update_weights(folder, version)
        assert update.canary is not None
        assert update.canary.mean_abs_diff < 1e-5
        assert engine._scheduler.decoder is decoder, "no second copy of the weights"
        expected = picked_logprobs(with_adapter(make_model(tiny_config()), folder), PROMPT)
        assert (scores(engine) - expected).abs().max() < 1e-4
    (generation,) = answers(engine, ask("a", PROMPT, 3))
    assert {version for choice in generation.choices for version in choice.versions} == {2}


def test_the_version_before_is_released_with_the_exchange(engine: EmbeddedEngine, base: Path, tmp_path: Path) -> None:
    engine.update_weights(adapter_version(base, tmp_path, 1), 1)
    answers(engine, ask("a", PROMPT, 3))
    before = weakref.ref(engine._scheduler._policy_adapter.layers[0].qkv.a_t)  # type: ignore[union-attr, arg-type]
    engine.update_weights(adapter_version(base, tmp_path, 2), 2)
    answers(engine, ask("b", PROMPT))
    gc.collect()
    assert before() is None


def test_other_adapters_beside_a_run_s_own_add_to_the_base(engine: EmbeddedEngine, base: Path, tmp_path: Path) -> None:
    model = make_model(tiny_config())
    other = save_adapter(model, tmp_path / "other", seed=9)
    engine.load_adapter("other", other)
    engine.update_weights(adapter_version(base, tmp_path, 1), 1)
    expected = picked_logprobs(with_adapter(model, other), PROMPT)
    assert (scores(engine, "other") - expected).abs().max() < 1e-4


def test_prefixes_of_other_adapters_outlive_an_update_that_leaves_the_base(
    engine: EmbeddedEngine, base: Path, tmp_path: Path
) -> None:
    engine.load_adapter("other", save_adapter(make_model(tiny_config()), tmp_path / "other", seed=9))
    long = [*PROMPT, *PROMPT, *PROMPT, *PROMPT]
    request = GenerationRequest("o", long, SamplingParams(max_tokens=2), adapter="other")
    answers(engine, ask("p", long), request)
    engine.update_weights(adapter_version(base, tmp_path, 1), 1)
    assert engine.status().total_prefix_hit_tokens == 0
    answers(engine, ask("p", long))
    assert engine.status().total_prefix_hit_tokens == 0, "the policy's own keys and values are the old version's"
    answers(engine, request)
    assert engine.status().total_prefix_hit_tokens == 32


def test_a_wrong_adapter_is_refused_by_its_canary_and_the_one_before_stays(
    engine: EmbeddedEngine, base: Path, tmp_path: Path
) -> None:
    engine.update_weights(adapter_version(base, tmp_path, 1), 1)
    before = scores(engine)
    with pytest.raises(WeightsRejected, match="version 2 is not served: log-probabilities differ"):
        engine.update_weights(adapter_version(base, tmp_path, 2, canary_offset=0.1), 2)
    assert torch.equal(scores(engine), before)
    assert engine.status().version == 1


def test_whole_weights_and_adapters_may_follow_each_other(engine: EmbeddedEngine, base: Path, tmp_path: Path) -> None:
    newer = make_model(tiny_config(), seed=7)
    engine.update_weights(publish(newer, tmp_path / "weights", 1), 1)
    assert (scores(engine) - picked_logprobs(newer, PROMPT)).abs().max() < 1e-4
    folder = adapter_version(base, tmp_path, 2)
    engine.update_weights(folder, 2)
    expected = picked_logprobs(with_adapter(make_model(tiny_config()), folder), PROMPT)
    assert (scores(engine) - expected).abs().max() < 1e-4
    engine.update_weights(publish(newer, tmp_path / "weights", 3), 3)
    assert (scores(engine) - picked_logprobs(newer, PROMPT)).abs().max() < 1e-4


@pytest.mark.parametrize(("targets", "is_by_row"), [(("down_proj", "lm_head"), True), (("q_proj", "gate"), False)])
def test_an_adapter_of_experts_and_head_is_kept_beside_the_base_and_one_of_routers_added_to_a_copy(
    targets: tuple[str, ...], is_by_row: bool, tmp_path: Path
) -> None:
    model = make_model(CONFIGS["qwen3_moe"])
    base = save_policy(model, tmp_path / "base")
    folder = save_adapter(model, tmp_path / "peft", targets=targets)
    published = publish_adapter(model, folder, base, tmp_path / "weights", 1)
    engine = start_engine(InferenceConfig(model=base, max_slots=8))
    try:
        decoder = engine._scheduler.decoder
        engine.update_weights(published, 1)
        assert (engine._scheduler.decoder is decoder) == is_by_row
        assert (scores(engine) - picked_logprobs(with_adapter(model, folder), PROMPT)).abs().max() < 1e-4
    finally:
        engine.close()


def test_an_engine_that_starts_from_an_adapter_takes_the_next_one_beside_the_base(base: Path, tmp_path: Path) -> None:
    first = adapter_version(base, tmp_path, 1)
    engine = start_engine(InferenceConfig(model=base, weights=first, version=1, max_slots=8))
    try:
        decoder = engine._scheduler.decoder
        expected = picked_logprobs(with_adapter(make_model(tiny_config()), first), PROMPT)
        assert (scores(engine) - expected).abs().max() < 1e-4
        engine.update_weights(adapter_version(base, tmp_path, 2), 2)
        assert engine._scheduler.decoder is decoder
    finally:
        engine.close()
    wrong = adapter_version(base, tmp_path, 3, canary_offset=0.1)
    with pytest.raises(UserError, match="cannot be started from"):
        start_engine(InferenceConfig(model=base, weights=wrong, version=3))


def test_an_engine_in_bfloat16_has_a_tolerance_of_its_own_and_says_so(base: Path, tmp_path: Path) -> None:
    config = InferenceConfig(model=base, max_slots=8, dtype="bfloat16")
    assert (config.tolerance, InferenceConfig(model=base).tolerance) == (0.02, 1e-3)
    assert InferenceConfig(model=base, dtype="bfloat16", canary_tolerance=0.5).tolerance == 0.5
    small = make_model(tiny_config(initializer_range=0.02))
    engine = start_engine(config)
    try:
        update = engine.update_weights(publish(small, tmp_path / "weights", 1), 1)
        assert update.canary is not None
        assert 1e-5 < update.canary.mean_abs_diff < 0.02
        status = engine.status()
        assert (status.dtype, status.canary_tolerance) == ("bfloat16", 0.02)
        with pytest.raises(WeightsRejected, match=r"more than the 0\.02 allowed"):
            engine.update_weights(publish(small, tmp_path / "weights", 2, canary_offset=0.1), 2)
    finally:
        engine.close()


def test_types_that_do_not_pay_are_refused_with_the_figure() -> None:
    with pytest.raises(ValidationError, match=r"6\.3 ms in bfloat16 and 28 ms in int8"):
        InferenceConfig.model_validate({"model": "m", "dtype": "int8"})
