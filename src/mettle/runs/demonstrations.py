"""Demonstrations for the warm-up: an environment's own questions and answers as chats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mettle.errors import UserError
from mettle.storage.files import write_atomic


def write_demonstrations(path: Path, rows: Iterable[Mapping[str, Any]], *, env_id: str) -> int:
    """Write `{"messages": [...]}` lines from dataset rows with `prompt` and `answer`; returns how many.

    A row's own `demonstration` (a message list or a text) is taken before its `answer`.
    Raises: UserError when no row has either.
    """
    lines = []
    for row in rows:
        reply = row.get("demonstration") or row.get("answer")
        if not reply:
            continue
        turns = list(reply) if isinstance(reply, list) else [{"role": "assistant", "content": str(reply)}]
        lines.append(json.dumps({"messages": [*(dict(m) for m in row["prompt"]), *turns]}, ensure_ascii=True))
    if not lines:
        raise UserError(
            f"environment {env_id!r} has no demonstrations: for a warm-up its rows need an 'answer' or 'demonstration'"
        )
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    return len(lines)
