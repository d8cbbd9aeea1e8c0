"""What parts of a run's config do not go together is refused, and the line says what to change."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from mettle.runs.config import RunConfig

VLLM = {"engine": "vllm", "vllm": {"python": "/usr/bin/python3"}}
REMOTE = {"engine": "remote", "remote": {"urls": ["http://127.0.0.1:8000/v1"]}}


def made(orchestrator=None, **tables):
    wanted = {"envs": [{"id": "reverse-text"}], **(orchestrator or {})}
    return RunConfig.model_validate({"orchestrator": wanted, **tables})


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"deployment": {"num_trainer_ranks": 3}, "trainer": {"context_parallel": 2}},
            r"context_parallel 2 does not divide deployment\.num_trainer_ranks 3: each group has equally many",
        ),
        (
            {"deployment": {"num_trainer_ranks": 6}, "trainer": {"num_replicas": 2, "context_parallel": 2}},
            "num_replicas 2 times context_parallel 2 does not divide",
        ),
        (
            {"trainer": {"cpu_offload": True, "device": "cuda"}},
            r"several ranks: leave it out, or raise deployment\.num_t",
        ),
        (
            {"trainer": {"keep_versions": 3}, "orchestrator": {"max_staleness": 3}},
            r"keep_versions 3 must exceed orchestrator\.max_staleness 3: a version is kept while its tokens may",
        ),
        ({"orchestrator": {"algorithm": "distillation"}}, "wants a teacher's whole distribution, and the trainer has"),
        (
            {"inference": {"outside": {"max_lag": 3}}},
            r"outside\.max_lag 3 is more than orchestrator\.max_staleness 2",
        ),
        ({"model": {"lora": {"rank": 64}}, "inference": {**VLLM, "vllm": {**VLLM["vllm"], "lora_rank": 16}}},
         r"lora_rank 16 is less than the run's own model\.lora\.rank 64; leave it out"),
        ({"deployment": {"engine": "ray", "share": "s"}}, r"deployment\.share is of one machine"),
        ({"deployment": {"engine": "ray"}, "inference": REMOTE}, "names servers that run already"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_what_to_change(tables, said):
    with pytest.raises(ValidationError, match=said):
        made(**tables)


def test_what_goes_together_is_taken():
    assert made(deployment={"num_trainer_ranks": 4}, trainer={"num_replicas": 2, "context_parallel": 2})
    assert made(trainer={"keep_versions": 4}, orchestrator={"max_staleness": 3})
    room = made(model={"lora": {"rank": 64}}, inference=VLLM).inference.vllm
    assert room is not None
    assert room.lora_rank == 64
