"""Environments in which the model has a Python of its own, whose variables stay from call to call.

Parts: `PythonEnv`, `PythonMonitorRubric`, `PythonSession` (the connection to `python_worker.py` inside the sandbox).
Invariant: whatever the code does (loops for ever, ends the interpreter, floods its output) is told to the model; only
a sandbox that is gone is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict

from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.sandbox_env import SandboxEnv, SandboxState, joined_output
from mettle.envs.sandboxes.boxes import warn_once
from mettle.envs.sandboxes.shared import SharedMachines, shared_machines
from mettle.envs.state import State
from mettle.errors import SandboxError
from mettle.records.messages import Messages

if TYPE_CHECKING:
    from mettle.sandbox.protocols import Job, Machine

logger = logging.getLogger(__name__)

_WORKER: Final = Path(__file__).with_name("python_worker.py")
_MAX_ANSWER_BYTES: Final = 8 << 20
_INTERRUPT_GRACE_S: Final = 2.0
_POLL_S: Final = 0.01
_PACKAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class PythonWorkerState(TypedDict):
    """What a rollout knows about its Python."""

    ready: bool
    execution_count: int
    ready_wait_time: float


class PythonWorkerNotReadyError(SandboxError):
    """The Python inside did not start in time."""


class PythonWorkerRequestError(SandboxError):
    """The Python inside could not be asked."""


class PythonWorkerDeadError(SandboxError):
    """The Python inside ended, and could not be started again."""


class PythonEnded(Exception):
    """The code ended its own interpreter, or garbled what it answers."""


class Reply(NamedTuple):
    """What the worker answered; None when it had to be given up."""

    answer: dict[str, Any] | None
    is_timed_out: bool = False


class PythonSession:
    """One interpreter in a machine. Used in the shared machines's loop."""

    def __init__(
        self, machine: Machine, job: Job, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._machine = machine
        self._job = job
        self._pid = pid
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, machine: Machine, timeout_s: float) -> PythonSession:
        """Start the worker and connect to it. Raises: PythonWorkerNotReadyError."""
        source = await asyncio.to_thread(_WORKER.read_text, "utf-8")
        job = await machine.start(["python3", "-u", "-c", source])
        try:
            async with asyncio.timeout(timeout_s):
                while not (said := (await job.output()).stdout).endswith("\n"):
                    if (ended := job.poll()) is not None:
                        raise PythonWorkerNotReadyError(f"Python ended at its start: {ended.stderr.strip()[-500:]}")
                    await asyncio.sleep(_POLL_S)
                pid, port, secret = said.split()
                connection = await machine.connect(int(port))
                reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_ANSWER_BYTES)
                writer.write(f"{secret}\n".encode())
        except TimeoutError as error:
            await job.kill()
            raise PythonWorkerNotReadyError(f"Python did not start within {timeout_s:g} s") from error
        return cls(machine, job, int(pid), reader, writer)

    async def run(self, code: str, timeout_s: float) -> Reply:
        """Run some code, and interrupt it when its time is over. Raises: PythonEnded."""
        try:
            self._writer.write(json.dumps({"code": code}).encode() + b"\n")
            await self._writer.drain()
            answer = asyncio.create_task(self._reader.readline())
            done, _ = await asyncio.wait({answer}, timeout=timeout_s)
            if not done:
                return Reply(await self._interrupt(answer), is_timed_out=True)
            line = answer.result()
        except (OSError, ValueError) as error:
            raise PythonEnded(str(error)) from error
        return Reply(_read_answer(line))

    async def _interrupt(self, answer: asyncio.Task[bytes]) -> dict[str, Any] | None:
        """What interrupted code answers, which keeps its variables; None if it does not let itself be interrupted."""
        await self._machine.exec(f"kill -INT {self._pid}", timeout_s=5)
        done, _ = await asyncio.wait({answer}, timeout=_INTERRUPT_GRACE_S)
        if not done:
            answer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answer
            return None
        return _read_answer(answer.result())

    async def close(self) -> None:
        """End the interpreter."""
        self._writer.close()
        with contextlib.suppress(SandboxError):
            await self._job.kill()


def _read_answer(line: bytes) -> dict[str, Any]:
    """The code can reach what answers, so that its answer is checked like anything else that it says."""
    try:
        answer = json.loads(line)
        found = {name: answer[name] for name in ("status", "stdout", "stderr", "result", "execution_count")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PythonEnded("no answer") from error
    texts = [found["status"], found["stdout"], found["stderr"], found["result"] or ""]
    if not all(isinstance(text, str) for text in texts) or type(found["execution_count"]) is not int:
        raise PythonEnded("no answer")
    return found


class PythonMonitorRubric(Rubric):
    """Metric `python_ready_wait_time` (seconds)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_metric(self.python_ready_wait_time)

    async def python_ready_wait_time(self, state: State) -> float:
        return float((state.get("python_state") or {}).get("ready_wait_time", 0.0))


class PythonEnv(SandboxEnv):
    """A `SandboxEnv` whose one tool is `python(code)`.

    The sandbox has no network: `pip_install_packages` are those of this machine's packages that it may import.
    """

    def __init__(
        self,
        pip_install_packages: str = "numpy sympy scipy",
        max_startup_wait_seconds: int = 30,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pip_install_packages = pip_install_packages
        self.max_startup_wait_seconds = max_startup_wait_seconds
        self.python_packages = tuple(
            match[0] for word in pip_install_packages.split() if (match := _PACKAGE.match(word)) is not None
        )
        self.sandbox_request.python_packages = self.python_packages
        self._sessions: dict[str, PythonSession] = {}  # by sandbox; touched in the shared machines's loop only
        self.remove_tool(self.bash)
        self.add_tool(self.python, args_to_skip=["sandbox_id", "sandbox_state", "python_state"])
        self.add_rubric(PythonMonitorRubric())

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Make the rollout's sandbox; its Python starts with the first call."""
        self._warn_of_missing_packages()
        state = await super().setup_state(state, **kwargs)
        state["python_state"] = PythonWorkerState(ready=False, execution_count=0, ready_wait_time=0.0)
        return state

    def _warn_of_missing_packages(self) -> None:
        from mettle.sandbox.packages import package_paths

        missing = package_paths(self.python_packages).missing
        if missing:
            names = " ".join(missing)
            warn_once(f"sandboxes have no network, and {names} is not installed here; `pip install {names}` adds it")

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State, **kwargs: Any
    ) -> dict[str, Any]:
        """The sandbox and its Python for `python`."""
        filled = super().update_tool_args(tool_name, tool_args, messages, state, **kwargs)
        if tool_name != "python":
            return filled
        hidden = ("sandbox_id", "sandbox_state", "python_state")
        return {**filled, **{name: state[name] for name in hidden}}

    async def python(
        self, code: str, sandbox_id: str, sandbox_state: SandboxState, python_state: PythonWorkerState
    ) -> str:
        """Run `code` in a Python that keeps its variables. The value of a last line that is an expression is shown.

        Args:
            code: The code.
        """
        await self._wait_for_sandbox_ready(sandbox_state, sandbox_id)
        home = shared_machines()
        limit_s = self.timeout_per_command_seconds
        started = time.perf_counter()
        try:
            reply = await home.run(self._ask_python(home, sandbox_id, python_state, code, limit_s))
        except PythonEnded:
            python_state["ready"] = False
            return "Error: Python ended while it ran this; it starts again, without its variables, at the next call"
        except SandboxError:
            raise
        except Exception as error:
            raise PythonWorkerRequestError(f"Python in sandbox {sandbox_id} could not be asked: {error}") from error
        sandbox_state["command_execution_times"].append(time.perf_counter() - started)
        return self._describe_reply(python_state, reply, limit_s)

    async def _ask_python(
        self, home: SharedMachines, sandbox_id: str, python_state: PythonWorkerState, code: str, limit_s: float
    ) -> Reply:
        box = home.boxes.get(sandbox_id)
        if box is None or not box.machine.is_alive:
            raise PythonWorkerDeadError(f"sandbox {sandbox_id} has ended, and its Python with it")
        session = self._sessions.get(sandbox_id)
        if session is None:
            started = time.perf_counter()
            session = await PythonSession.start(box.machine, self.max_startup_wait_seconds)
            self._sessions[sandbox_id] = session
            python_state["ready"] = True
            python_state["ready_wait_time"] += time.perf_counter() - started
        try:
            reply = await session.run(code, limit_s)
        except BaseException:
            await self._end_session(sandbox_id)
            raise
        if reply.answer is None:
            await self._end_session(sandbox_id)
        return reply

    async def _end_session(self, sandbox_id: str) -> None:
        session = self._sessions.pop(sandbox_id, None)
        if session is not None:
            await session.close()

    def _describe_reply(self, python_state: PythonWorkerState, reply: Reply, limit_s: float) -> str:
        if not reply.is_timed_out and reply.answer is not None:
            return self._format_response(python_state, reply.answer)
        said = f"Error: Command timed out after {limit_s}s"
        if reply.answer is None:
            python_state["ready"] = False
            return f"{said}\nPython could not be interrupted; it starts again, without its variables, at the next call"
        return f"{said}\n{self._format_response(python_state, reply.answer)}"

    def _format_response(self, python_state: PythonWorkerState, sandbox_response: dict[str, Any]) -> str:
        """An answer as the model reads it: output, then the value of the last line or the traceback."""
        count = sandbox_response.get("execution_count")
        python_state["execution_count"] = python_state["execution_count"] + 1 if count is None else int(count)
        parts = [joined_output(sandbox_response.get("stdout") or "", sandbox_response.get("stderr") or "")]
        result = sandbox_response.get("result")
        if result is not None and sandbox_response.get("status") == "error":
            parts.append(str(result).strip())
        elif result is not None:
            parts.append(f"Out[{python_state['execution_count']}]: {result}")
        return "\n".join(part for part in parts if part) or "(no output)"

    async def delete_sandbox(self, sandbox_id: str) -> None:
        """End the sandbox and forget its Python."""
        with contextlib.suppress(Exception):
            await shared_machines().run(self._end_session(sandbox_id))
        await super().delete_sandbox(sandbox_id)
