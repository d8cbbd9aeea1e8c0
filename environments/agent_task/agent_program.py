"""A small agent: it reads a task, works with four tools until the model calls none, and needs only Python itself.

    python3 agent_program.py [--dialect chat|messages|responses] [--max-steps 30]

The model is at OPENAI_BASE_URL (`chat`, `responses`) or ANTHROPIC_BASE_URL (`messages`); the task is instruction.md in
METTLE_TASK_DIR. Parts: the tools, a class for each dialect, the loop. Invariant: what a tool does wrong is told to the
model; only an API that fails ends the program with an error.
"""

import argparse
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

MAX_SHOWN = 8000
RUN_S = 20
SYSTEM = (
    "You are a careful programmer at work in a folder. Use the tools to look, to change files and to try what you have "
    "changed. When the task is done, say so without calling a tool."
)


def list_files(path="."):
    """The files at and below a folder."""
    found = []
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(name for name in inner if not name.startswith((".", "__")))
        found += [os.path.relpath(os.path.join(folder, name), path) for name in sorted(names)]
    return "\n".join(found[:500]) or "(no files)"


def read_file(path):
    """The text of a file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def write_file(path, content):
    """Write a file, and the folders on the way to it."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(content)
    return f"{len(content)} characters written to {path}"


def run(command):
    """Run a command in a shell."""
    try:
        ended = subprocess.run(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=RUN_S,
        )
    except subprocess.TimeoutExpired:
        return f"the command did not end within {RUN_S} s"
    return f"{ended.stdout}{ended.stderr}\nexit code {ended.returncode}".lstrip()


TOOLS = {
    "list_files": (list_files, "List the files at and below a folder.", {"path": "the folder"}, []),
    "read_file": (read_file, "Read a file.", {"path": "the file"}, ["path"]),
    "write_file": (
        write_file,
        "Write a file; what it held is lost.",
        {"path": "the file", "content": "all of its text"},
        ["path", "content"],
    ),
    "run": (run, "Run a command in a shell and see what it prints.", {"command": "the command"}, ["command"]),
}


def schema(fields, required):
    """JSON schema of a tool's arguments, all of them texts."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": told} for name, told in fields.items()},
        "required": required,
    }


def use(name, arguments):
    """What a tool answers to a call."""
    if name not in TOOLS:
        return f"Error: there is no tool {name}; there are {', '.join(TOOLS)}"
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        said = str(TOOLS[name][0](**given))
    except Exception as error:
        return f"Error: {type(error).__name__}: {error}"
    cut = len(said) - MAX_SHOWN
    return said if cut <= 0 else f"{said[:MAX_SHOWN]}\n... ({cut} more characters)"


def post(url, body, headers):
    """The answer of an API, as data."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=3600) as answer:
        return json.load(answer)


class Chat:
    """Chat completions."""

    def __init__(self, task):
        self.messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
        self.tools = [
            {"type": "function", "function": {"name": n, "description": d, "parameters": schema(f, r)}}
            for n, (_, d, f, r) in TOOLS.items()
        ]

    def ask(self):
        """The calls in the model's next message: id, name, arguments."""
        body = {"model": os.environ["OPENAI_MODEL"], "messages": self.messages, "tools": self.tools}
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
        said = post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)["choices"][0]["message"]
        self.messages.append(said)
        return [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in said.get("tool_calls") or ()]

    def tell(self, results):
        """Let the model know what its calls have come to."""
        self.messages += [{"role": "tool", "tool_call_id": key, "content": text} for key, text in results]


class Messages:
    """Anthropic's messages."""

    def __init__(self, task):
        self.messages = [{"role": "user", "content": task}]
        self.tools = [{"name": n, "description": d, "input_schema": schema(f, r)} for n, (_, d, f, r) in TOOLS.items()]

    def ask(self):
        """The calls in the model's next message: id, name, arguments."""
        body = {
            "model": os.environ["OPENAI_MODEL"],
            "system": SYSTEM,
            "messages": self.messages,
            "tools": self.tools,
            "max_tokens": 4096,
        }
        headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
        said = post(f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages", body, headers)["content"]
        self.messages.append({"role": "assistant", "content": said})
        return [(block["id"], block["name"], block["input"]) for block in said if block["type"] == "tool_use"]

    def tell(self, results):
        """Let the model know what its calls have come to."""
        blocks = [{"type": "tool_result", "tool_use_id": key, "content": text} for key, text in results]
        self.messages.append({"role": "user", "content": blocks})


class Responses:
    """OpenAI's responses."""

    def __init__(self, task):
        self.items = [{"role": "user", "content": task}]
        self.tools = [
            {"type": "function", "name": n, "description": d, "parameters": schema(f, r)}
            for n, (_, d, f, r) in TOOLS.items()
        ]

    def ask(self):
        """The calls in the model's next output: id, name, arguments."""
        body = {
            "model": os.environ["OPENAI_MODEL"],
            "instructions": SYSTEM,
            "input": self.items,
            "tools": self.tools,
            "store": False,
        }
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
        said = post(f"{os.environ['OPENAI_BASE_URL']}/responses", body, headers)["output"]
        self.items += said
        return [(i["call_id"], i["name"], i["arguments"]) for i in said if i["type"] == "function_call"]

    def tell(self, results):
        """Let the model know what its calls have come to."""
        self.items += [{"type": "function_call_output", "call_id": key, "output": text} for key, text in results]


DIALECTS = {"chat": Chat, "messages": Messages, "responses": Responses}


def main():
    """Work on the task until the model is done, or may not go on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dialect", choices=DIALECTS, default="chat")
    parser.add_argument("--max-steps", type=int, default=30)
    chosen = parser.parse_args()
    with open(os.path.join(os.environ.get("METTLE_TASK_DIR", "/task"), "instruction.md"), encoding="utf-8") as file:
        talk = DIALECTS[chosen.dialect](file.read())
    for _ in range(chosen.max_steps):
        try:
            calls = talk.ask()
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", "replace")
            print(f"the API answers {error.code}: {said}", file=sys.stderr)
            return 0 if error.code == 403 else 1
        if not calls:
            return 0
        talk.tell([(key, use(name, arguments)) for key, name, arguments in calls])
    return 0


if __name__ == "__main__":
    sys.exit(main())
