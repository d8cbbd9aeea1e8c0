"""The real `prime` client against a real Hub: the table of docs/reference/prime-clients.md, call by call.

Each pin of `prime_pins.toml` is installed in an environment of its own; METTLE_CLIENT_VENVS names a folder that has them
already (`a`, `b`, `c`). A cell of the table says what happens: works, no such command, or refuses (the client's own
doing, or ours, with the reason beneath the table).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

import httpx
import pytest
from tests.hub.lab_writer import HubWriter

DOC = Path(__file__).parents[3] / "docs" / "reference" / "prime-clients.md"
PINS = tomllib.loads(Path(__file__).with_name("prime_pins.toml").read_text())
WAIT_S = 900.0
pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(7200)]


def table() -> dict[str, dict[str, str]]:
    """What the page says: call -> pin -> cell."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in DOC.read_text().splitlines()
        if line.startswith("| `")
    ]
    return {
        row[0].strip("`"): dict(zip("abc", (re.sub(r"\[\^.*", "", cell).strip() for cell in row[1:4]), strict=True))
        for row in rows
    }


@pytest.fixture(scope="module", params=sorted(PINS))
def client(request, tmp_path_factory, server):
    """The client of a pin, at a home of its own."""
    given = os.environ.get("METTLE_CLIENT_VENVS")
    folder = Path(given) / request.param if given else tmp_path_factory.mktemp(f"prime-{request.param}") / "venv"
    if not given:
        venv.create(folder, with_pip=True)
        installed = subprocess.run(
            [folder / "bin" / "pip", "install", "-q", *PINS[request.param]], capture_output=True, text=True, check=False
        )
        if installed.returncode:
            pytest.skip(f"no package index, or no {PINS[request.param][0]}: {installed.stderr.strip()[-200:]}")
    return Prime(request.param, folder, tmp_path_factory.mktemp(f"home-{request.param}"), *server)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a Hub in a process of its own, with bob, and bob's session."""
    folder = tmp_path_factory.mktemp("served")
    made = HubWriter(folder / "hub")
    made.person("bob")
    token = made.token("bob")
    made.close()
    ready = folder / "ready.json"
    words = [
        "--data",
        str(folder / "hub"),
        "--runs",
        str(folder / "hub" / "runs"),
        "--port",
        "0",
        "--ready-file",
        str(ready),
    ]
    process = subprocess.Popen([sys.executable, "-m", "mettle.cli", "hub", "serve", *words], cwd=folder)
    try:
        deadline = time.monotonic() + WAIT_S
        while not ready.exists():
            assert process.poll() is None, "the Hub has ended"
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield json.loads(ready.read_text())["base_url"], token
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)


class Prime:
    """The command line of one pin; `results` has what became of each call."""

    def __init__(self, pin: str, folder: Path, home: Path, url: str, token: str) -> None:
        self.pin, self.home, self.url = pin, home, url
        self.program = folder / "bin" / "prime"
        self.api = httpx.Client(base_url=f"{url}/api/v1", headers={"Authorization": f"Bearer {token}"}, timeout=600)
        self.environ = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(home), "VIRTUAL_ENV": str(folder),
            "PRIME_API_BASE_URL": url, "PRIME_FRONTEND_URL": url, "PRIME_INFERENCE_URL": f"{url}/inference/api/v1",
            "PRIME_API_KEY": token, "PRIME_DISABLE_VERSION_CHECK": "1", "NO_COLOR": "1", "COLUMNS": "200", "TERM": "dumb",
            **{name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))},
        }  # fmt: skip
        self.results: dict[str, str] = {}

    def run(self, *words: str, **environ: str) -> tuple[int, str]:
        done = subprocess.run(
            [self.program, "--plain", *words], cwd=self.home, env={**self.environ, **environ}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def call(self, label: str, *words: str, says: str = "", code: int = 0) -> str:
        """One call of the table; it works when it ends as it should and says what it should."""
        found, said = self.run(*words)
        if found == 2 and re.search(r"No such (command|option)|Unexpected extra argument|Missing argument", said):
            outcome = "no such command"
        else:
            outcome = "works" if found == code and says in said else "refuses"
        self.results[label] = outcome
        self.said = said
        print(f"[{self.pin}] {label}: {outcome} (rc {found})\n{said if outcome != 'works' else ''}")
        return said


def test_the_table_of_calls_is_what_happens(client):
    signs_in(client)
    pushes(client)
    evaluates(client)
    works_in_sandboxes(client)
    trains(client)
    client.call("env delete", "env", "delete", f"bob/acc-{client.pin}", "-f")
    said = table()
    assert client.results.keys() == said.keys()
    assert client.results == {call: cells[client.pin] for call, cells in said.items()}


def signs_in(prime: Prime) -> None:
    """`login` as a person does it: the code is approved in a browser's session."""
    process = subprocess.Popen(
        [prime.program, "login", "--headless"], cwd=prime.home, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**{k: v for k, v in prime.environ.items() if k != "PRIME_API_KEY"}, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    said = ""
    for line in process.stdout:
        said += line
        code = re.search(r"code=([A-Z0-9-]+)", said)
        if code:
            approve(prime.url, code[1])
            break
    said += process.communicate(timeout=WAIT_S)[0]
    prime.results["login --headless"] = (
        "works" if process.returncode == 0 and "uccessfully logged in" in said else "refuses"
    )
    print(said)
    kept = json.loads((prime.home / ".prime" / "config.json").read_text())
    assert kept["api_key"].startswith("mtl_")
    prime.environ["PRIME_API_KEY"] = kept["api_key"]
    prime.call("whoami", "whoami", says="bob")
    prime.call("teams list", "teams", "list")


def approve(url: str, code: str) -> None:
    from tests.hub.lab_writer import PASSWORD

    with httpx.Client(base_url=url, timeout=600, follow_redirects=True) as page:
        page.post("/signin", data={"username": "bob", "password": PASSWORD})
        csrf = re.search(r'name="csrf" value="([^"]+)"', page.get(f"/dashboard/tokens/challenge?code={code}").text)[1]
        assert page.post("/dashboard/tokens/challenge", data={"csrf": csrf, "code": code}).status_code == 200


def pushes(prime: Prime) -> None:
    name, module = f"acc-{prime.pin}", f"acc_{prime.pin}"
    folder = prime.home / name
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "0.1.0"\ndescription = "Tries"\nrequires-python = ">=3.10"\n'
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[tool.hatch.build]\ninclude = ["*.py", "README.md", "pyproject.toml"]\n'
    )
    (folder / "README.md").write_text("# Tries\n")
    (folder / f"{module}.py").write_text("def load_environment(**args): ...\n")
    slug = f"bob/{name}"
    prime.call("env push", "env", "push", "--path", name, "--visibility", "PUBLIC", says="uccessfully pushed")
    prime.call("env push of the same", "env", "push", "--path", name, says="already exists", code=1)
    prime.call("env list", "env", "list", "--mine", says=slug)
    prime.call("env info", "env", "info", slug, says=f"{prime.url}/owners/bob/simple/")
    prime.call("env inspect", "env", "inspect", slug, says="README.md")
    prime.call("env version list", "env", "version", "list", slug, says="0.1.0")
    prime.call("env status", "env", "status", slug, says="0.1.0")
    prime.call("env install --with pip", "env", "install", slug, "--with", "pip", says="uccessfully installed")
    prime.call("env pull", "env", "pull", slug, "--target", "pulled", says="README.md")
    prime.call("env info of none", "env", "info", "bob/none", says="not found", code=1)


def evaluates(prime: Prime) -> None:
    folder = prime.home / "results"
    folder.mkdir()
    told = {
        "env_id": f"acc-{prime.pin}",
        "env": f"acc-{prime.pin}",
        "model": "acc/model",
        "num_examples": 2,
        "avg_reward": 0.5,
    }
    (folder / "metadata.json").write_text(json.dumps({**told, "rollouts_per_example": 2}))
    row = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    rows = [{"example_id": n // 2, "reward": float(n % 2), **row} for n in range(4)]
    (folder / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    prime.call(
        "eval push", "eval", "push", "results", "--env", f"bob/acc-{prime.pin}", says=f"{prime.url}/evaluations/"
    )
    made = prime.api.get("/evaluations/").json()["evaluations"][0]["id"]
    prime.call("eval list", "eval", "list", says="acc/model")
    prime.call("eval get", "eval", "get", made, says='"total_samples": 4')
    prime.call("eval samples", "eval", "samples", made, "--page", "2", "-n", "3", says='"total": 4')


def works_in_sandboxes(prime: Prime) -> None:
    (prime.home / "up.txt").write_text("hello\n")
    for kind, words in {"VM": ["--vm"], "container": ["--container"]}.items():
        own = ["--vm"] if prime.pin == "a" and kind == "VM" else words if kind == "container" else []
        size = ["--disk-size-gb", "1", "--timeout-minutes", "60", "--yes", "--name", "acc"]
        said = prime.call(f"sandbox create ({kind})", "sandbox", "create", "python:3.11-slim", *own, *size, says="m-")
        if prime.results[f"sandbox create ({kind})"] != "works":
            steps = ("run", "upload", "download", "list", "expose", "delete", "run of a deleted")
            prime.results |= {f"sandbox {step} ({kind})": "no such command" for step in steps}
            continue
        one = re.search(r"m-[0-9a-f]{12}", said)[0]
        prime.call(
            f"sandbox run ({kind})",
            "sandbox",
            "run",
            one,
            "--",
            "sh",
            "-c",
            "echo $((6 * 7)); exit 7",
            says="42",
            code=7,
        )
        prime.call(f"sandbox upload ({kind})", "sandbox", "upload", one, "up.txt", "/tmp/up.txt")
        down = f"down-{kind}.txt"
        prime.call(f"sandbox download ({kind})", "sandbox", "download", one, "/tmp/up.txt", down)
        assert (prime.home / down).read_text() == "hello\n"
        prime.call(f"sandbox list ({kind})", "sandbox", "list", says=one)
        prime.run(
            "sandbox",
            "run",
            one,
            "--",
            "sh",
            "-c",
            "cd /tmp; nohup python3 -m http.server 8000 >/dev/null 2>&1 & sleep 3",
        )
        prime.call(f"sandbox expose ({kind})", "sandbox", "expose", one, "8000", "-o", "json", says='"exposure_id"')
        for opened in prime.api.get(f"/sandbox/{one}/expose").json()["exposures"]:
            assert httpx.get(f"{opened['url']}/up.txt", timeout=600).text == "hello\n"
        prime.call(f"sandbox delete ({kind})", "sandbox", "delete", one, "--yes")
        prime.call(f"sandbox run of a deleted ({kind})", "sandbox", "run", one, "--", "true", code=1)


def trains(prime: Prime) -> None:
    sizes = 'batch_size = 32\nrollouts_per_example = 8\n\n[sampling]\nmax_tokens = 16\n\n[[env]]\nid = "reverse-text"\n'
    for name, steps in (("short", 2), ("long", 100_000)):
        (prime.home / f"{name}.toml").write_text(f'name = "{name}"\nmodel = "tiny"\nmax_steps = {steps}\n{sizes}')
    prime.call("train models", "train", "models", says="tiny")
    prime.call("train run", "train", "run", "short.toml", "--yes", says="/dashboard/training/")
    if prime.results["train run"] == "works":
        run = prime.api.get("/rft/runs").json()["runs"][0]["id"]
    else:
        body = {"model": "tiny", "environments": [{"id": "reverse-text"}], "max_steps": 2, "batch_size": 32}
        run = prime.api.post("/rft/runs", json=body).json()["run"]["id"]
    prime.call("train list", "train", "list", says=run)
    prime.call("train get", "train", "get", run, says="tiny")
    assert ended(prime, run) == "COMPLETED"
    prime.call("train logs", "train", "logs", run, says="finished")
    prime.call("train metrics", "train", "metrics", run, says='"step": 2')
    prime.call("train checkpoints", "train", "checkpoints", run, says=f"{run}-v2")
    body = {"model": "tiny", "environments": [{"id": "reverse-text"}], "max_steps": 100_000, "batch_size": 32}
    long = prime.api.post("/rft/runs", json=body).json()["run"]["id"]
    prime.call("train stop", "train", "stop", long, "-f")
    assert ended(prime, long) == "STOPPED"
    prime.call("train delete", "train", "delete", run, "-f")


def ended(prime: Prime, run: str) -> str:
    deadline = time.monotonic() + WAIT_S
    while True:
        status = prime.api.get(f"/rft/runs/{run}").json()["run"]["status"]
        if status not in ("QUEUED", "RUNNING"):
            return status
        assert time.monotonic() < deadline, status
        time.sleep(1)
