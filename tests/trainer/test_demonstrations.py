"""What `mettle data generate` writes is what the warm-up reads."""

from __future__ import annotations

import json

from mettle.clients.renderer import Renderer
from mettle.synthesis.config import Rules
from mettle.synthesis.dataset import source_of, write_dataset
from mettle.synthesis.selection import select
from mettle.trainer.demonstrations import batch_of, read_demonstrations


def test_a_generated_set_reads_as_demonstrations(tmp_path, mini_model):
    renderer = Renderer.from_directory(mini_model)
    call = json.dumps({"id": "1", "name": "f", "arguments": '{"n": 7}'})
    rows = [
        {
            "prompt": [{"role": "user", "content": f"q{task}"}],
            "completion": [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "7"},
                {"role": "assistant", "content": str(task)},
            ],
            "tool_defs": [{"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}],
            "reward": 1.0,
        }
        for task in range(5)
    ]
    rules = Rules(min_reward=0.5, held_out=0.0)
    write_dataset(tmp_path, select(rows, rules), source_of({"env_id": "e", "model": "m"}), rules, ["jsonl"])
    found = read_demonstrations(tmp_path / "train.jsonl", renderer)
    trained = {renderer.decode(each.token_ids[each.is_trained], skip_special_tokens=False) for each in found}
    assert trained == {
        f'<tool_call>{{"name": "f", "arguments": {{"n": 7}}}}</tool_call><|end|>{task}<|end|>' for task in range(5)
    }
    assert len(batch_of(found, 1).sequence_lengths)
