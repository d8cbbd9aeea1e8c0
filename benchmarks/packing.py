"""How well is a batch packed, and what does planning it take? Cut into passes and dealt to ranks.

    python benchmarks/packing.py [--json FILE]

Parts: dealing 256 passes to 32 ranks (heaviest rank over the mean, and CPU time), and whole plans of 512 rollouts for 1
to 8 ranks: the share of computed tokens that are no padding, the heaviest rank over the mean, passes that a rank lacks,
the step's length in tokens (in each round all wait for the costliest) over that of one rank divided by the ranks, and
CPU time. Compared with what longest-first dealing of sequences and cutting each rank's own would give. Figures are CPU
time of one thread; the shares do not depend on the host.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from mettle.records.tokens import COLUMNS, Batch, filled
from mettle.trainer.config import MicroBatchConfig
from mettle.trainer.dealing import deal
from mettle.trainer.layout import Form, Index, Sequences
from mettle.trainer.passes import PASS_PRICE, ForwardPass, plan_passes, rows_behind_prompts

ATTENTION_COST = 1 / 2048
SEEDS = range(10)


def make_sequences(seed: int, *, num_groups: int = 32, group_size: int = 16) -> Sequences:
    """Groups behind prompts of 50 to 300 tokens, answers of 20 to 400, most of them short."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    lengths: list[int] = []
    for _ in range(num_groups):
        prompt = rng.integers(0, 256, int(rng.integers(50, 300)))
        for _ in range(group_size):
            number = len(prompt) + int(np.clip(rng.lognormal(4.6, 0.6), 20, 400))
            mask = np.arange(number) >= len(prompt)
            ids = np.concatenate([prompt, rng.integers(0, 256, number - len(prompt))])
            values = {
                "token_ids": ids,
                "loss_mask": mask,
                "logprobs": np.where(mask, -1.0, 0.0),
                "rl_weights": mask * 1.0,
            }
            lengths.append(number)
            for name, column in filled(number, values).items():
                columns[name].append(column)
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    return Sequences.of(Batch(sequence_lengths=np.array(lengths, np.int32), step=1, draw_ids=(), **arrays))


def longest_first(sequences: Sequences, config: MicroBatchConfig, num_ranks: int) -> list[list[ForwardPass]]:
    """Sequences dealt longest first to the lightest rank, each rank sharing prompts and filling passes by itself."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    trained = np.flatnonzero(sequences.num_members)
    for s in trained[np.argsort(-sequences.needed[trained], kind="stable")].tolist():
        rank = loads.index(min(loads))
        ranks[rank].append(s)
        loads[rank] += int(sequences.needed[s])
    found = []
    for members in ranks:
        rows, alone = rows_behind_prompts(sequences, np.array(members), ATTENTION_COST, config.max_tokens)
        shared = _filled(sequences, rows, config, "shared")
        found.append(shared + _filled(sequences, [np.array([s]) for s in alone], config, "padded"))
    return found


def _filled(sequences: Sequences, rows: list[Index], config: MicroBatchConfig, form: Form) -> list[ForwardPass]:
    tails = sequences.needed - sequences.prompts
    lengths = [int(sequences.prompts[row[0]] + tails[row].sum()) for row in rows]
    passes: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: -lengths[i]):
        longest = lengths[passes[-1][0]] if passes else 0
        if not passes or len(passes[-1]) >= config.max_rows or (len(passes[-1]) + 1) * longest > config.max_tokens:
            passes.append([])
        passes[-1].append(i)
    pairs = ATTENTION_COST / (1 if form == "shared" else 2)
    return [
        ForwardPass(form, [rows[i] for i in chosen], PASS_PRICE + len(chosen) * (w + pairs * w**2))
        for chosen in passes
        for w in [float(lengths[chosen[0]])]
    ]


def figures(sequences: Sequences, ranks: list[list[ForwardPass]], alone: float) -> dict[str, float]:
    """What a plan comes to; `alone` is the cost of all passes on one rank."""
    own = computed = 0
    tails = sequences.needed - sequences.prompts
    for each in (each for passes in ranks for each in passes):
        lengths = [int(sequences.prompts[row[0]] + tails[row].sum()) for row in each.rows]
        own += sum(lengths)
        computed += len(lengths) * max(lengths)
    loads = [sum(each.cost for each in passes) for passes in ranks]
    most = max(map(len, ranks))
    rounds = sum(max(p[i].cost if i < len(p) else PASS_PRICE for p in ranks) for i in range(most))
    return {
        "useful": own / computed,
        "heaviest_over_mean": max(loads) / (sum(loads) / len(loads)),
        "lacking": float(sum(most - len(passes) for passes in ranks)),
        "over_ideal": rounds / (alone / len(ranks)),
        "passes": float(sum(map(len, ranks))),
    }


def dealing() -> dict[str, float]:
    """256 passes of 60 to 100 % of a full one to 32 ranks."""
    worst, longest = 0.0, 0.0
    for seed in range(50):
        costs = np.random.default_rng(seed).uniform(5000, 8192, 256)
        costs += ATTENTION_COST / 2 * costs * 200
        started = time.process_time()
        dealt = deal(costs, 32)
        longest = max(longest, time.process_time() - started)
        worst = max(worst, max(costs[members].sum() for members in dealt) / (costs.sum() / 32))
    return {"heaviest_over_mean": worst, "longest_ms": longest * 1000}


def plans() -> list[dict[str, Any]]:
    """Plans of 512 rollouts, the mean over seeds of each figure and the worst of two."""
    config, found = MicroBatchConfig(), []
    for num_ranks in (1, 2, 4, 8):
        for name in ("longest first", "planned", "planned, packed"):
            rows, spent = [], []
            for seed in SEEDS:
                sequences = make_sequences(seed)
                is_packed = name == "planned, packed"
                alone = sum(
                    each.cost
                    for each in plan_passes(sequences, config, attention_cost=ATTENTION_COST, is_packed=is_packed)[0]
                )
                started = time.process_time()
                if name == "longest first":
                    ranks = longest_first(sequences, config, num_ranks)
                else:
                    ranks = plan_passes(
                        sequences, config, attention_cost=ATTENTION_COST, num_ranks=num_ranks, is_packed=is_packed
                    )
                spent.append(time.process_time() - started)
                row = figures(sequences, ranks, alone)
                if is_packed:
                    row["useful"] = 1.0  # a packed row has no padding at all
                rows.append(row)
            mean = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
            worst = {"least_useful": min(r["useful"] for r in rows), "most_ms": max(spent) * 1000}
            found.append({"ranks": num_ranks, "plan": name, **mean, **worst})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="How well a batch is packed, and what planning it takes.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    dealt, found = dealing(), plans()
    print(
        f"256 passes to 32 ranks: heaviest {dealt['heaviest_over_mean']:.4f} of the mean, {dealt['longest_ms']:.1f} ms"
    )
    print("ranks plan              useful (least)  heaviest  lacking  passes  over ideal  longest ms")
    for row in found:
        print(
            f"{row['ranks']:5} {row['plan']:16} {row['useful']:7.3f} {row['least_useful']:7.3f} "
            f"{row['heaviest_over_mean']:9.3f} {row['lacking']:8.1f} {row['passes']:7.1f} {row['over_ideal']:11.3f} "
            f"{row['most_ms']:11.1f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"dealing": dealt, "plans": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
