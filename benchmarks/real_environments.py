"""How many published environments load and run: a folder of them, one process each, no network.

Each folder in `--folder` holds an environment written for verifiers (`name/name.py`, or a package, with
`load_environment`). It is imported, built and rolled out twice against a scripted endpoint on this machine. Datasets
are stood in for by rows that have the columns which the source asks for; every OpenAI client that the environment
makes (judges, simulated users) is led to the same endpoint; other connections are refused. With `--library verifiers`
the same is done with an installed verifiers, for comparison (run it with that interpreter).
The number that matters: how many ran, and why the others did not.

Run: `python benchmarks/real_environments.py --folder DIR [--library mettle|verifiers] [--json FILE] [--only NAME]`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from synthetic_rows import make_rows

TIMEOUT_S = 120
ANSWER = (
    "<think>so</think>\n<answer>4</answer> <judgement>YES</judgement> <grade>A</grade> <guess>[crane]</guess>\n"
    "CORRECTNESS: YES yes A 4 \\boxed{4}"
)
OWN_FAULT = "missing 3 required positional arguments"
"""In the failure of reward functions that ask for arguments that no release ever gave."""
SWALLOWED: list[str] = []


class ScriptedEndpoint(BaseHTTPRequestHandler):
    """Chat completions: one call of the first tool, where there are tools, and then the same answer for everybody."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(_completion(body) if "messages" in body else _text_completion(body)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Nothing to say."""


def _completion(body: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ANSWER}
    has_called = any(said.get("role") == "tool" for said in body["messages"])
    if body.get("tools") and not has_called:
        function = body["tools"][0]["function"]
        arguments = json.dumps(_arguments(function.get("parameters") or {}))
        call = {"id": "call_0", "type": "function", "function": {"name": function["name"], "arguments": arguments}}
        message.update(content=None, tool_calls=[call])
    return {**_envelope(), "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def _text_completion(body: dict[str, Any]) -> dict[str, Any]:
    return {
        **_envelope(),
        "object": "text_completion",
        "choices": [{"index": 0, "text": ANSWER, "finish_reason": "stop"}],
    }


def _envelope() -> dict[str, Any]:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    return {"id": "r", "object": "chat.completion", "created": 0, "model": "scripted", "usage": usage}


def _arguments(schema: dict[str, Any]) -> dict[str, Any]:
    examples = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    properties = schema.get("properties") or {}
    return {name: examples.get(kind.get("type", ""), "x") for name, kind in properties.items()}


def run_one(folder: Path, library: str) -> dict[str, Any]:
    """Import, build and roll out the environment in `folder`, in this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), ScriptedEndpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    source = "\n".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    stage = "import"
    try:
        _stub_the_world(url, source)
        loader = _loader(folder, library)
        stage = "load"
        env = loader(folder.name, **_required_arguments(folder.name, url))
        stage = "run"
        outputs = asyncio.run(_evaluate(env, url, library))
    except BaseException as error:
        return {"stage": stage, "ok": False, "error": _one_line(error), "cause": _cause(error)}
    errors = [output.get("error") for output in outputs if output.get("error")]
    if errors:
        text = str(errors[0].get("message") or errors[0].get("error_chain_repr"))
        cause = "its own reward function" if OWN_FAULT in text else "rollout"
        return {"stage": "run", "ok": False, "error": text[:300], "cause": cause}
    rewards = [output.get("reward") for output in outputs]
    return {"stage": "run", "ok": True, "rewards": rewards, "silent": sorted(set(SWALLOWED))}


def _log_record(*parts: Any, **more: Any) -> logging.LogRecord:
    """A log record; what verifiers logs when a reward function raises, which it then scores 0, is kept."""
    record = logging.LogRecord(*parts, **more)
    if record.levelno >= logging.ERROR and "reward function" in record.getMessage():
        SWALLOWED.append(record.getMessage()[:200])
    return record


async def _evaluate(env: Any, url: str, library: str) -> list[dict[str, Any]]:
    if library == "mettle":
        from mettle.envs import ClientConfig
    else:
        from verifiers import ClientConfig
    config = ClientConfig(api_base_url=url, api_key_var="OPENAI_API_KEY")
    results = await asyncio.wait_for(
        env.evaluate(client=config, model="scripted", num_examples=1, rollouts_per_example=2), TIMEOUT_S / 2
    )
    return list(results["outputs"])


def _loader(folder: Path, library: str) -> Any:
    sys.path.insert(0, str(folder))
    if library == "verifiers":
        import verifiers
    else:
        from mettle.envs.legacy.aliases import install_verifiers_alias

        install_verifiers_alias()
        import verifiers
    __import__(folder.name)
    return verifiers.load_environment


def _required_arguments(name: str, url: str) -> dict[str, Any]:
    """A value for every parameter of `load_environment` that has no default."""
    import inspect

    parameters = inspect.signature(sys.modules[name].load_environment).parameters.values()
    missing = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return {parameter.name: url if "url" in parameter.name else "scripted" for parameter in missing}


def _stub_the_world(url: str, source: str) -> None:
    logging.setLogRecordFactory(_log_record)
    os.environ["OPENAI_BASE_URL"] = url
    for name in ("OPENAI_API_KEY", "PRIME_API_KEY", "ANTHROPIC_API_KEY", "EXA_API_KEY", "SERPER_API_KEY", "HF_TOKEN"):
        os.environ[name] = "none"
    random.seed(0)  # Some make their rows by chance.
    _refuse_the_network()
    import datasets
    import openai

    datasets.disable_progress_bars()
    datasets.load_dataset = lambda *args, **kwargs: make_rows(source, args, kwargs)
    for kind in (openai.OpenAI, openai.AsyncOpenAI):
        _lead_to(kind, url)


def _lead_to(kind: Any, url: str) -> None:
    original = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.update(base_url=url, api_key="none", max_retries=0)
        original(self, *args, **kwargs)

    kind.__init__ = init


def _refuse_the_network() -> None:
    connect = socket.socket.connect

    def only_here(self: Any, address: Any) -> Any:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise ConnectionRefusedError(f"no network: {address}")
        return connect(self, address)

    socket.socket.connect = only_here  # type: ignore[method-assign]
    resolve = socket.getaddrinfo

    def only_numbers(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in ("127.0.0.1", "::1", "localhost", None):
            raise socket.gaierror(f"no network: {host}")
        return resolve(host, *args, **kwargs)

    socket.getaddrinfo = only_numbers


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _cause(error: BaseException) -> str:
    """`third party` for a missing package, `network` for a refused connection or key, else `library`."""
    text = "".join(traceback.format_exception(error))
    if "is not offered here" in text:
        return "not offered"
    if "No module named" in text and "No module named 'verifiers" not in text:
        return "third party"
    signs = ("no network", "APIConnectionError", "Connection error", "MissingKeyError", "nltk.download")
    if any(sign in text for sign in signs):
        return "network"
    if isinstance(error, SyntaxError):
        return "its own source"
    if _is_raised_by_it(error):
        return "its own check"
    return "library"


def _is_raised_by_it(error: BaseException) -> bool:
    """Whether the environment's own code has refused something: a setting that it wants, a service."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/environments/" in frames[-1].filename and (frames[-1].line or "").startswith("raise ")


def main() -> None:
    """Run every environment of a folder, each in its own process, and tell the counts."""
    options = _options()
    if options.one:
        print(json.dumps(run_one(Path(options.one).resolve(), options.library)))
        sys.stdout.flush()
        os._exit(0)
    folders = sorted(path for path in Path(options.folder).iterdir() if path.is_dir() and path.name.isidentifier())
    if options.only:
        folders = [path for path in folders if path.name == options.only]
    results = {folder.name: try_in_process(folder, options.library) for folder in folders}
    loaded = sum(result["ok"] or result["stage"] == "run" for result in results.values())
    ran = sum(result["ok"] for result in results.values())
    silent = sum(bool(result.get("silent")) for result in results.values())
    print(f"{len(results)} tried, {loaded} loaded, {ran} ran ({options.library})")
    print(f"of those that ran, {silent} with a reward function that raised and was scored 0 in silence")
    print(dict(Counter(result["cause"] for result in results.values() if not result["ok"])))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


def try_in_process(folder: Path, library: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch, open(Path(scratch) / "told", "w+", encoding="utf-8") as told_file:
        copy = shutil.copytree(folder, Path(scratch) / "environments" / folder.name)
        if not (copy / "pyproject.toml").exists():  # Its package is what the name is looked for by.
            (copy / "pyproject.toml").write_text(f'[project]\nname = "{folder.name}"\n', encoding="utf-8")
        command = [sys.executable, __file__, "--one", str(copy), "--library", library]
        process = subprocess.Popen(
            command, stdout=told_file, stderr=subprocess.DEVNULL, cwd=scratch, start_new_session=True
        )
        try:
            process.wait(TIMEOUT_S)
            told_file.seek(0)
            result: dict[str, Any] = json.loads(told_file.read().strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            result = {"stage": "run", "ok": False, "error": f"nothing after {TIMEOUT_S} s", "cause": "timeout"}
        except (ValueError, IndexError):
            result = {"stage": "import", "ok": False, "error": f"exit status {process.returncode}", "cause": "crash"}
        finally:
            with contextlib.suppress(ProcessLookupError):  # Workers that the library left behind end with it.
                os.killpg(process.pid, signal.SIGKILL)
    told = "ran" if result["ok"] else f"{result['stage']}: {result['cause']}: {result['error']}"
    print(f"{folder.name:28} {told}", flush=True)
    return result


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder")
    parser.add_argument("--library", choices=("mettle", "verifiers"), default="mettle")
    parser.add_argument("--only")
    parser.add_argument("--json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
