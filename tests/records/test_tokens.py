"""The columns of a token are declared in one place: nobody else lists them, and a new one travels the whole way."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mettle.records import tokens
from mettle.records.tokens import COLUMNS, Batch, Sample, end_to_end, filled

SOURCE = Path(tokens.__file__).parents[1]


def test_what_nobody_says_anything_of_has_its_fill_value_in_its_type():
    columns = filled(3, {"token_ids": [5, 6, 7]})
    assert list(columns) == list(COLUMNS)
    for name, column in COLUMNS.items():
        assert columns[name].dtype == column.dtype
        if column.is_wide:
            assert columns[name].shape == (3, 0)
        elif name != "token_ids":
            assert columns[name].tolist() == [column.fill] * 3
        assert column.meaning
    assert Sample(**columns).oldest_version == -1


def test_columns_of_different_lengths_are_refused():
    short = filled(3, {"advantages": np.zeros(2)})
    with pytest.raises(ValueError, match=r"Sample.advantages has shape \(2,\), token_ids has \(3,\)"):
        Sample(**short)
    with pytest.raises(ValueError, match="sequence_lengths sum to 2, not 3"):
        Batch(sequence_lengths=np.array([2]), step=1, draw_ids=(), **filled(3, {}))


def test_rows_end_to_end_keep_each_columns_order():
    rows = [
        Sample(**filled(n, {name: np.full((n, 1) if COLUMNS[name].is_wide else n, n) for name in COLUMNS}))
        for n in (2, 1)
    ]
    for name, values in end_to_end(rows).items():
        expected = [True] * 3 if name == "loss_mask" else [2, 2, 1]
        assert values.ravel().tolist() == expected


def test_no_other_file_lists_the_columns():
    """A file may name those that it fills or reads. Whoever names nearly all of them has a list of its own."""
    counts = {}
    for path in SOURCE.rglob("*.py"):
        if path == Path(tokens.__file__):
            continue
        text = path.read_text(encoding="utf-8")
        counts[path.relative_to(SOURCE).as_posix()] = sum(bool(re.search(rf"\b{name}\b", text)) for name in COLUMNS)
    assert max(counts.values()) < len(COLUMNS) - 1, max(counts, key=counts.get)


PROBE = '''
"""A column declared by one more line goes from an algorithm to a loss."""
import asyncio, sys, tempfile, types
from pathlib import Path
import mettle.records

path = Path(mettle.records.__file__).parent / "tokens.py"
source = path.read_text()
anchor = "    ref_logprobs: Floats"
assert source.count(anchor) == 1
source = source.replace(anchor, '    surprises: Floats = field(metadata=_credit("how unexpected it was"))\\n' + anchor)
module = types.ModuleType("mettle.records.tokens")
sys.modules["mettle.records.tokens"] = mettle.records.tokens = module
exec(compile(source, str(path), "exec"), module.__dict__)

import numpy as np, torch
from mettle.orchestrator.algorithms import Algorithm
from mettle.orchestrator.credit import checked
from mettle.orchestrator.batcher import ReadyGroup
from mettle.orchestrator.samples import group_samples
from mettle.orchestrator.services import InMemoryServices
from mettle.orchestrator.shipping import assemble
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw, Turn
from mettle.storage.batches import read_batch, write_batch
from mettle.storage.shards import decode_group, encode_group
from mettle.trainer.layout import Sequences, lay_out
from mettle.trainer.passes import plan_passes
from mettle.trainer.config import MicroBatchConfig
from mettle.trainer.loss import TargetTensors, total_loss
from mettle.trainer.losses import PolicyLoss
from dataclasses import replace

class Surprised(Algorithm):
    async def credit(self, group, services):
        return [{"advantages": 1.0, "surprises": [np.array([3.0, 4.0])]} for _ in group.rollouts]

class Reads(PolicyLoss):
    def surrogate(self, seen):
        seen_columns.append(seen.columns.surprises.tolist())
        return seen.logprobs_K * seen.columns.surprises, seen.moved_K > 2

turn = Turn(0, np.array([1, 2]), np.array([3, 4]), np.array([-1.0, -1.0]), np.zeros(2, np.int32))
group = GroupRecord(TaskDraw(1, "e", "u", 0, 0), 0, (RolloutRecord("r", 1.0, {}, [], (turn,)),))
(credit,) = checked(asyncio.run(Surprised().credit(group, InMemoryServices())), group)
group = decode_group(encode_group(replace(group, rollouts=(replace(group.rollouts[0], credit=credit),))))
samples = group_samples(group, seq_len=9, keep_zero_advantages=False)
folder = Path(tempfile.mkdtemp())
batch = read_batch(folder, write_batch(folder, assemble(1, [ReadyGroup.of(1, samples)]))[0])
sequences = Sequences.of(batch)
(((each,),),) = [plan_passes(sequences, MicroBatchConfig(), attention_cost=0.01)]
layout = lay_out(sequences, each.form, each.rows)
targets = TargetTensors.of(layout.targets, torch.device("cpu"))
seen_columns = []
own = torch.tensor([-1.0, -2.0], requires_grad=True)
total_loss(own, own.detach(), targets, sequences.counts, Reads(kl_tau=0)).loss.backward()
assert seen_columns == [[3.0, 4.0]], seen_columns
assert own.grad.tolist() == [-1.5, -2.0], own.grad
'''


def test_one_more_line_carries_a_column_from_an_algorithm_to_a_loss():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
