"""What can grammars that want to be dear cost the engine, in its longest step?

Sixteen sequences at once, each under a grammar that is ambiguous, deep, or wide; a tiny model, so that the step is the
grammars' alone. Those that are refused before the engine hears of them are named, with what their compilation took.

    PYTHONPATH=src:tests/inference OMP_NUM_THREADS=1 python benchmarks/hostile_grammars.py

The number that matters is the longest step in CPU-milliseconds, beside one without grammars.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from policies import END, make_model, save_tokenizer, tiny_config
from schedulers import Heard, ask, make_scheduler

from mettle.inference.engine.grammars import Grammars
from mettle.inference.engine.protocol import RequestRefused
from mettle.records.sampling import Constraint

NODE = {
    "anyOf": [
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/node"}},
        {"type": "array", "items": {"$ref": "#/$defs/node"}},
        {"type": "string"},
    ]
}
HOSTILE = {
    "ambiguous": Constraint("grammar", 'start: s\ns: s s | "a" | ""'),
    "more ambiguous": Constraint("grammar", 'start: e\ne: e e e | e e | "a" | "aa" | "aaa"'),
    "nested": Constraint("grammar", 'start: x*\nx: "a" x? x? x? "a"?'),
    "a far look back": Constraint("regex", "(a|b)*a(a|b){14}c"),
    "counts of counts": Constraint("regex", "(.{0,400}x){0,400}"),
    "counts of counts of counts": Constraint("regex", "((a{0,99}){0,99}){0,99}b"),
    "recursive schema": Constraint("json", json.dumps({"$defs": {"node": NODE}, "$ref": "#/$defs/node"})),
    "wide choice": Constraint("choice", json.dumps([f"w{i * 7919 % 100_003}" for i in range(6000)])),
    "patterns": Constraint(
        "json",
        json.dumps(
            {
                "type": "object",
                "properties": {f"p{i}": {"type": "string", "pattern": f"^(a|b)*{i}$"} for i in range(800)},
            }
        ),
    ),
}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    save_tokenizer(folder)
    model = make_model(tiny_config())
    grammars = Grammars(folder / "tokenizer.json", 264, [END])
    served = []
    for name, constraint in HOSTILE.items():
        started = time.process_time()
        try:
            grammars.begin(constraint)
            outcome = "served"
            served.append(constraint)
        except RequestRefused as error:
            outcome = str(error)
        spent = (time.process_time() - started) * 1e3
        sys.stdout.write(f"{name}: compiled in {spent:.1f} CPU-ms, {outcome}\n")
    for kept in (None, served):
        scheduler, heard = make_scheduler(model, max_slots=16, eos_token_ids=(END,), grammars=grammars), Heard()
        for i in range(16):
            constraint = None if kept is None else kept[i % len(kept)]
            # Towards the tokens that the ambiguous ones can read in most ways, and away from an early end.
            bias = ((END, -100.0), (ord("a"), 20.0))
            request = ask(str(i), [5, 17, 3], max_tokens=180, seed=i, constraint=constraint, logit_bias=bias)
            scheduler.add(request, heard)
        steps = []
        while True:
            started = time.process_time()
            is_left = scheduler.step()
            steps.append((time.process_time() - started) * 1e3)
            if not is_left:
                break
        what = "free" if kept is None else "hostile"
        sys.stdout.write(
            f"16 {what} rows: {len(steps)} steps, longest {max(steps):.1f} CPU-ms, median "
            f"{sorted(steps)[len(steps) // 2]:.1f}, {len(heard.errors)} failed by a bound\n"
        )


if __name__ == "__main__":
    main()
