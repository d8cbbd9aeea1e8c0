"""What the model is told of its code, its tools and its context, before the task.

Parts: `scaffold`, `with_scaffold`. Invariant: the row's own messages are not changed; the first user message begins
with the scaffold.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mettle.envs.tool_schema import tool_of
from mettle.records.messages import Messages, UserMessage

_PYTHON = """\
You work with the tool `call_python_repl(code)`: a Python whose variables stay from call to call. When you know the
answer, set `answer["content"]` to it (a text) and `answer["ready"] = True`; that ends the task."""
_BASH = """\
You work with the tool `call_bash_repl(code)`: a bash whose directory and exported variables stay from call to call.
When you know the answer, set RLM_CONTENT to it and RLM_READY=1; that ends the task."""
_LLM_BATCH = {
    "python": "`llm_batch(prompts)` asks a language model all prompts of a list at once; the answers are a list.",
    "bash": "`llm_batch 'PROMPT' ...` asks a language model all prompts at once; several answers are printed as JSON.",
}
_SEEN = "Only what your code prints is shown to you, at most {limit} characters of it."


def scaffold(
    language: str, tools: Mapping[str, Callable[..., Any]], context: str, max_output: int, *, has_sub_models: bool
) -> str:
    """The text for one rollout; `context` says where its context is, empty for none."""
    lines = [_PYTHON if language == "python" else _BASH, _SEEN.format(limit=max_output)]
    if context:
        lines.append(f"The context of the task is {context}; read it with code, in parts.")
    if has_sub_models:
        lines.append(_LLM_BATCH[language])
    if tools:
        how = "functions" if language == "python" else "commands (with `--json '{...}'` for arguments that are no text)"
        lines.append(f"Your code may call these {how}:")
        lines += [_described(name, function, language) for name, function in tools.items()]
    return "\n\n".join(lines)


def _described(name: str, function: Callable[..., Any], language: str) -> str:
    parameters = inspect.signature(function).parameters
    about = tool_of(function).get("description") or ""
    if language == "python":
        return f"- `{name}({', '.join(map(str, parameters.values()))})` {about}".rstrip()
    return f"- `{' '.join([name, *(parameter.upper() for parameter in parameters)])}` {about}".rstrip()


def with_scaffold(prompt: Messages, text: str) -> Messages:
    """The prompt, its first user message begun with `text`."""
    for index, message in enumerate(prompt):
        if message["role"] == "user":
            return [*prompt[:index], _begun_with(message, text), *prompt[index + 1 :]]
    return [*prompt, UserMessage(content=text)]


def _begun_with(message: Any, text: str) -> Any:
    said = message.get("content")
    if isinstance(said, list):
        return message.model_copy(update={"content": [{"type": "text", "text": text}, *said]})
    return message.model_copy(update={"content": f"{text}\n\n{said or ''}".rstrip()})
