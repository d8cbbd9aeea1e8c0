"""How many small faults in a module do its own tests find?

    python tests/mutation/gate.py sampler ledger --sample 40

Parts: `TARGETS` says which module has which tests; `measure` plants a sample of the module's faults, one at a time.

Invariants: the sample is drawn with a fixed seed, so two runs on one source judge the same faults. Nothing counts as
found unless the tests are green without a fault. A fault that no test reaches is not run: it survives.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mutants import Mutant, mutants_of
from preloading import preload
from trial import EVERY_TEST_OF_FILE, Ended, Trial

ROOT = Path(__file__).resolve().parents[2]
SEED = 1
CPU_FACTOR = 3.0
"""A fault that makes the tests take longer than this many times what they take without is found: it never ends."""
CPU_START_S = 15.0
"""What a trial may take besides, to start."""


@dataclass(frozen=True)
class Target:
    """A module under test, by its path below `src/mettle`, and its tests, by their paths below `tests`."""

    source: str
    tests: tuple[str, ...]


TARGETS = {
    "sampler": Target("inference/engine/sampler.py", ("inference/engine/test_sampler.py",)),
    "canary": Target("inference/engine/canary.py", ("inference/engine/test_canary.py",)),
    "scheduler": Target(
        "inference/engine/scheduler.py",
        (
            "inference/engine/test_scheduler.py",
            "inference/engine/test_prompts.py",
            "inference/engine/test_memory.py",
            "inference/engine/test_grammars.py",
        ),
    ),
    "admission": Target("orchestrator/admission.py", ("orchestrator/test_admission.py",)),
    "ledger": Target("storage/ledger.py", ("storage/test_ledger.py",)),
    "checkpoints": Target("storage/checkpoints.py", ("storage/test_checkpoints.py",)),
    "scoring": Target("envs/rubrics/scoring.py", ("envs/rubrics/test_scoring.py",)),
    "rubric": Target("envs/rubrics/rubric.py", ("envs/rubrics/test_rubric.py", "envs/rubrics/test_scoring.py")),
    "loss": Target("trainer/loss.py", ("trainer/test_loss.py",)),
    "packing": Target("trainer/layout.py", ("trainer/test_layout.py",)),
    "mismatch": Target("trainer/mismatch/monitor.py", ("trainer/mismatch/test_monitor.py",)),
    "samples": Target("orchestrator/samples.py", ("orchestrator/test_samples.py",)),
    "batcher": Target("orchestrator/batcher.py", ("orchestrator/test_batcher.py", "orchestrator/test_admission.py")),
    "outside": Target("inference/outside/checks.py", ("inference/outside/test_checks.py",)),
    "liveness": Target("processes/liveness.py", ("processes/test_liveness.py",)),
    "watchdog": Target("runs/watchdog.py", ("runs/test_watchdog.py",)),
}


@dataclass
class Score:
    """What became of the faults that were planted in a module."""

    name: str
    num_faults: int
    num_planted: int = 0
    num_found: int = 0
    cpu_s: float = 0.0
    survivors: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.num_found / self.num_planted if self.num_planted else 0.0

    def __str__(self) -> str:
        of = f"{self.num_found} of {self.num_planted} found" + (
            f" (a sample of {self.num_faults})" if self.num_planted < self.num_faults else ""
        )
        return f"{self.name:12} {self.share:5.0%}  {of}, {self.cpu_s:.0f} CPU-s"


def measure(name: str, target: Target, *, sample: int, seed: int = SEED, root: Path = ROOT) -> Score:
    """Plant up to `sample` faults and count those that the tests find.

    Raises: RuntimeError when the tests are not green without a fault.
    """
    path = root / "src" / "mettle" / target.source
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = "mettle." + target.source.removesuffix(".py").replace("/", ".")
    trial = Trial(root, module, path)
    tests = [f"tests/{test}" for test in target.tests]
    whole = trial.run(tests, tree, cpu_s=600.0, is_traced=True)
    if not whole.is_green:
        raise RuntimeError(f"the tests of {name} are not green without a fault:\n{whole.output}")
    preload(whole.modules, root / "src" / "mettle", module)
    faults = mutants_of(tree)
    chosen = faults if sample >= len(faults) else random.Random(seed).sample(faults, sample)
    score = Score(name, len(faults))
    lines = path.read_text(encoding="utf-8").splitlines()
    for fault in sorted(chosen, key=lambda one: (one.line, one.index, one.operand)):
        score.num_planted += 1
        reaching = _reaching(whole, tree, fault, tests)
        ended = None
        if reaching:
            ended = trial.run(reaching, fault.plant(tree), cpu_s=CPU_START_S + CPU_FACTOR * whole.cpu_s)
            score.cpu_s += ended.cpu_s
        if ended is None or ended.is_green:
            score.survivors.append(f"{path.name}:{fault.line} {fault.what} | {lines[fault.line - 1].strip()}")
        else:
            score.num_found += 1
    return score


def _reaching(whole: Ended, tree: ast.Module, fault: Mutant, tests: list[str]) -> list[str]:
    """The tests that pass through the statement of the fault; where it is run on import, all of them."""
    statement = _statement_at(tree, fault.line)
    passing = set().union(*(whole.lines[line] for line in range(statement.lineno, fault.line + 1)))
    if EVERY_TEST_OF_FILE in passing:
        return tests
    files = {test.removesuffix(f"::{EVERY_TEST_OF_FILE}") for test in passing if test.endswith(EVERY_TEST_OF_FILE)}
    return sorted(files | {test for test in passing if test.partition("::")[0] not in files})


def _statement_at(tree: ast.Module, line: int) -> ast.stmt:
    """The innermost statement around a line."""
    around = [
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))


def main(arguments: list[str]) -> int:
    """Measure the modules that are named, all where none is; prints a line each, and the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", choices=[[], *TARGETS], metavar="MODULE", help="which modules; all where none is given"
    )
    parser.add_argument("--sample", type=int, default=10**6, help="faults to plant in each module (default: all)")
    parser.add_argument("--seed", type=int, default=SEED, help="draws the sample")
    parser.add_argument("--json", type=Path, help="write the score of the one module to this file")
    options = parser.parse_args(arguments)
    names = options.names or list(TARGETS)
    if len(names) > 1:  # a process for each: what one module may have loaded ahead imports the next
        sample = ["--sample", str(options.sample), "--seed", str(options.seed)]
        return max(subprocess.run([sys.executable, __file__, name, *sample]).returncode for name in names)
    score = measure(names[0], TARGETS[names[0]], sample=options.sample, seed=options.seed)
    print(score, *score.survivors, sep="\n    ", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(score), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
