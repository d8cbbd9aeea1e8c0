"""Small projects for an agent program: code to repair or to write, data to put right; judged in a fresh machine.

Parts: `AgentTaskEnv`, rows, rewards. The program is the one that is shipped here, or your own. A row names a
family and a seed, from which its project is made again. Invariants: only files leave the machine that the agent has
worked in; what they do is tried in another one, in which no expected value ever is.
"""

from __future__ import annotations

import json
import random
import shlex
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from agent_code_jobs import implement, repair
from agent_data_jobs import contacts, invoices, readings
from agent_job import Call, Draft, Job, is_same

import mettle.envs as vf
from mettle.envs.proxy.machines import AgentMachine
from mettle.envs.sandboxes import CreateSandboxRequest

MAKERS = {maker.__name__: maker for maker in (repair, implement, contacts, readings, invoices)}
DIALECTS = ("chat", "messages", "responses")
PROJECT, AGENT, RUNNER = "/work/project", "/agent", "/judge/run.py"
EVAL_SHARE = 5
"""One job in so many is for evaluation."""
MAX_FILE_BYTES = 1 << 20
JUDGE_S = 10.0
RUN_CALLS = f"""\
import importlib, json, os, sys
calls = json.load(sys.stdin)
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the project prints is nobody's answer
sys.path.insert(0, {PROJECT!r})
for module, function, args in calls:
    try:
        said = json.dumps([getattr(importlib.import_module(module), function)(*args)])
    except BaseException as error:
        said = json.dumps(type(error).__name__)
    print(said, file=out, flush=True)
"""
NOUNS = (
    "amber", "basin", "cedar", "delta", "ember", "fjord", "garnet", "harbor", "island", "jasper", "lagoon", "maple",
    "nickel", "orchid", "pepper", "quartz", "raven", "summit", "tulip", "velvet", "walnut", "winter",
)  # fmt: skip


def draft_of(family: str, seed: int) -> Draft:
    """What is asked in a row."""
    return MAKERS[family](random.Random(f"{family}/{seed}"))


def job_of(info: Mapping[str, Any]) -> Job:
    """The job of a row."""
    return _made(info["family"], info["seed"])


@lru_cache(512)
def _made(family: str, seed: int) -> Job:
    return draft_of(family, seed).make()


def make_rows(num_rows: int, *, for_eval: bool, families: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Jobs of one split, as many of each family. No question comes twice."""
    rng = random.Random(f"{seed}/{for_eval}")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < num_rows:
        family = families[len(rows) % len(families)]
        info: dict[str, Any] = {"family": family, "seed": rng.getrandbits(48)}
        name = f"{'-'.join(rng.sample(NOUNS, 2))} {rng.randint(0, 9)}.{rng.randint(0, 99)}"
        question = f"This is the project {name}, in `{PROJECT}`. {draft_of(family, info['seed']).instruction}"
        if (zlib.crc32(question.encode()) % EVAL_SHARE == 0) == for_eval and question not in rows:
            rows[question] = {"question": question, "info": info}
    return list(rows.values())


class AgentTaskEnv(vf.CliAgentEnv):
    """Brings the project, lets the agent work, and judges the files that it leaves."""

    async def post_sandbox_setup(self, state: vf.State) -> None:
        """The project of the row."""
        files = job_of(state["info"]).files
        await self.machine(state).upload_files({f"{PROJECT}/{name}": text for name, text in files.items()})

    async def post_rollout(self, state: vf.State) -> None:
        """Take the files out, and try them elsewhere."""
        await super().post_rollout(state)
        if state.get("error") is not None:
            return
        job = job_of(state["info"])
        goals = [is_same(_json(await self._left(state, path)), wanted) for path, wanted in job.results.items()]
        calls = (*job.goals, *job.guards)
        passed = await self._passed(state, job, calls) if calls else []
        state["judged"] = {"goals": goals + passed[: len(job.goals)], "guards": passed[len(job.goals) :]}

    async def _left(self, state: vf.State, path: str) -> str | None:
        try:
            data: bytes = await self.machine(state).download(f"{PROJECT}/{path}", max_bytes=MAX_FILE_BYTES)
        except OSError:
            return None
        return data.decode("utf-8", "replace")

    async def _passed(self, state: vf.State, job: Job, calls: Sequence[Call]) -> list[bool]:
        """Which calls of the project's modules return what they must."""
        modules = [path for path in job.files if path.endswith(".py") and path != "tests.py"]
        left = {f"{PROJECT}/{path}": text for path in modules if (text := await self._left(state, path)) is not None}
        request = CreateSandboxRequest(
            name="judge",
            backend=self.sandbox_backend,
            timeout_minutes=5,
            **_resources(self.get_sandbox_resources(state)),
        )
        sandbox = await self.with_retry(self.sandbox_client.create)(request)
        self.register_sandbox(sandbox.id)
        try:
            machine = await AgentMachine.of(sandbox.id)
            await machine.upload_files({**left, RUNNER: RUN_CALLS})
            asked = json.dumps([[call.module, call.function, call.args] for call in calls])
            ended = await machine.exec(["python3", RUNNER], cwd="/judge", stdin=asked, timeout_s=JUDGE_S)
        finally:
            await self.delete_sandbox(sandbox.id)
        said = [_json(line) for line in ended.stdout.splitlines()[: len(calls)]]
        said += ["nothing"] * (len(calls) - len(said))
        return [is_same(found, [call.expected]) for found, call in zip(said, calls, strict=True)]

    def demonstrate(self, messages: vf.Messages, row: Mapping[str, Any]) -> dict[str, Any]:
        """The next call of a tool of the shipped agent, by how many there were."""
        steps = job_of(row["info"]).solution
        done = sum(len(message.get("tool_calls") or ()) for message in messages if message["role"] == "assistant")
        if done >= len(steps):
            return {"role": "assistant", "content": "Done."}
        call = {"id": f"call_{done}", "name": steps[done].tool, "arguments": json.dumps(dict(steps[done].arguments))}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


def _resources(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("cpu_cores", "memory_gb", "disk_size_gb")}


def _json(text: str | None) -> Any:
    """What a text means; a word of ours if it is no JSON."""
    try:
        return json.loads(text or "")
    except (ValueError, RecursionError):
        return "no JSON"


def solved(state: vf.State) -> float:
    """1 when all goals are met and what was right has stayed right."""
    judged = state["judged"]
    return float(all(judged["goals"]) and all(judged["guards"]))


def fraction_met(state: vf.State) -> float:
    """Share of the goals that are met; 0 when something that was right is wrong now."""
    judged = state["judged"]
    return sum(judged["goals"]) / len(judged["goals"]) if all(judged["guards"]) else 0.0


def agent_files(agent: str | None) -> tuple[dict[str, Path], str]:
    """What to bring into the machine, and the path of the program there."""
    source = Path(agent).expanduser() if agent else Path(__file__).with_name("agent_program.py")
    if not source.exists():
        raise ValueError(f"the agent {agent!r} is not there; give the path of a Python program or of a folder")
    return {f"{AGENT}/{source.name}" if source.is_file() else AGENT: source}, str(PurePosixPath(AGENT, source.name))


def load_environment(
    agent: str | None = None,
    run_command: str | None = None,
    dialect: str = "chat",
    families: list[str] | None = None,
    partial_credit: bool = False,
    max_turns: int = 20,
    timeout_s: float = 300.0,
    memory_mb: int = 512,
    disk_mb: int = 64,
    python_packages: list[str] | None = None,
    num_train: int = 1000,
    num_eval: int = 100,
    seed: int = 0,
) -> vf.CliAgentEnv:
    """Jobs for the shipped agent, or for the program `agent`, started as `python3 AGENT` or by `run_command`."""
    chosen = list(families or MAKERS)
    if unknown := [family for family in chosen if family not in MAKERS]:
        raise ValueError(f"there are no families {unknown}; there are {sorted(MAKERS)}, not more")
    if dialect not in DIALECTS:
        raise ValueError(f"dialect is one of {DIALECTS}, not {dialect!r}")
    files, program = agent_files(agent)
    if agent and not run_command and Path(agent).expanduser().is_dir():
        raise ValueError(f"the agent {agent!r} is a folder, which does not say what to start; give run_command, too")
    own = f"python3 {shlex.quote(program)}" + ("" if agent else f" --dialect {dialect} --max-steps {max_turns}")
    split: dict[str, Any] = {"families": chosen, "seed": seed}
    return AgentTaskEnv(
        run_command or own,
        dataset=lambda: make_rows(num_train, for_eval=False, **split),
        eval_dataset=lambda: make_rows(num_eval, for_eval=True, **split),
        rubric=vf.Rubric([solved, fraction_met], weights=[0.0, 1.0] if partial_credit else [1.0, 0.0]),
        max_turns=max_turns,
        timeout_seconds=timeout_s,
        memory_gb=memory_mb / 1024,
        disk_size_gb=disk_mb / 1024,
        files=files,
        working_dir=PROJECT,
        python_packages=python_packages or (),
    )
