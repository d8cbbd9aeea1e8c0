"""Questions over an encyclopedia, answered by searching it and reading its sections.

The encyclopedia that comes with the package describes a country that does not exist (`wiki_world`), so that nothing can
be answered from memory. A corpus of one's own is given as a folder. The answer stands inside `<answer>` in a message
without tool calls, and is compared without case, articles and punctuation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wiki_index import Index, words
from wiki_world import make_questions, make_world

import mettle.envs as vf

SYSTEM_PROMPT = (
    "Answer the question from the encyclopedia. Search for pages, list a page's sections, read sections; then give "
    "the answer alone, as short as it can be, inside <answer> tags."
)
ARTICLES = {"the", "a", "an"}
SECTION_ID = re.compile(r"(?P<title>.+):(?P<section>[^:]+)")
Pages = dict[str, dict[str, str]]
"""Sections by name, of pages by title."""


class Library:
    """The pages, and the tools over them. Every tool answers with a text, whatever it is asked."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self._index = Index({title: "\n".join(sections.values()) for title, sections in pages.items()})

    def search_pages(self, query: str) -> str:
        """Search the encyclopedia and get the titles of the ten best pages, one a line.

        Args:
            query: Words to look for in titles and texts.
        """
        found = self._index.search(query)
        return "\n".join(found) if found else f"nothing found for {query!r}; try other words"

    def list_sections(self, title: str) -> str:
        """List the ids of the sections of a page, one a line.

        Args:
            title: The exact title of a page, as the search gives it.
        """
        if title not in self.pages:
            return f"there is no page {title!r}; search for its title"
        return "\n".join(f"{title}:{section}" for section in self.pages[title])

    def read_section(self, section_id: str) -> str:
        """Read one section of a page.

        Args:
            section_id: The id of a section, `Title:Section`, as list_sections gives it.
        """
        found = SECTION_ID.fullmatch(section_id)
        text = self.pages.get(found["title"], {}).get(found["section"]) if found else None
        return text if text is not None else f"there is no section {section_id!r}; list the sections of its page"


def read_corpus(folder: Path) -> tuple[Pages, list[dict[str, Any]], list[dict[str, Any]]]:
    """Pages and questions of a folder: pages.jsonl (title, sections or text), train.jsonl and eval.jsonl."""

    def lines(name: str) -> list[dict[str, Any]]:
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: a corpus has pages.jsonl, train.jsonl and eval.jsonl")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]

    pages = {page["title"]: page.get("sections") or {"Text": page["text"]} for page in lines("pages.jsonl")}
    return pages, lines("train.jsonl"), lines("eval.jsonl")


def same(given: str | None, answer: str) -> bool:
    """Whether two answers are the same but for case, articles and punctuation."""
    mine, right = ([word for word in words(text or "") if word not in ARTICLES] for text in (given, answer))
    return bool(mine) and mine == right


def correct(completion: Any, answer: str, parser: Any) -> float:
    """1 when the answer given is the right one."""
    return float(same(parser.parse_answer(completion[-1:]), answer))


def format_has_answer(completion: Any, parser: Any) -> float:
    """1 when the last message holds an answer."""
    return float(bool(parser.parse_answer(completion[-1:])))


def demonstrate(messages: list[Any], row: Mapping[str, Any]) -> Any:
    """Walk the pages of `info.path`: search, list, read every section; then answer."""
    results = sum(message["role"] == "tool" for message in messages)
    plan: list[tuple[str, dict[str, str]]] = []
    for title in (row.get("info") or {}).get("path", []):
        plan += [("search_pages", {"query": title}), ("list_sections", {"title": title})]
        listed = [m["content"] for m in messages if m["role"] == "tool" and m["content"].startswith(f"{title}:")]
        plan += [("read_section", {"section_id": line}) for line in (listed[0].splitlines() if listed else [])]
        if results < len(plan):
            break
    if results < len(plan):
        name, arguments = plan[results]
        call = vf.ToolCall(id=f"call_{results}", name=name, arguments=json.dumps(arguments))
        return vf.AssistantMessage(content="", tool_calls=[call])
    return f"<answer>{row['answer']}</answer>"


def load_environment(
    corpus: str | None = None,
    hops: list[int] | None = None,
    max_turns: int = 20,
    num_train: int = 1000,
    num_eval: int = 100,
    seed: int = 0,
) -> vf.ToolEnv:
    """Questions of the given numbers of `hops` (1 to 3) over the made encyclopedia, or of a `corpus` folder."""
    hops = hops or [1, 2, 3]
    if not set(hops) <= {1, 2, 3}:
        raise ValueError(f"hops are 1, 2 or 3, not {hops}")
    if corpus is not None:
        pages, train, evaluation = read_corpus(Path(corpus))
    else:
        world = make_world(seed)
        pages = {title: page.sections for title, page in world.items()}
        # One draw for both splits, so that no question is in both.
        rows = make_questions(world, num_train + num_eval, hops=hops, seed=f"{seed}/{sorted(hops)}")
        train, evaluation = rows[num_eval:], rows[:num_eval]
    library = Library(pages)
    parser = vf.XMLParser(["answer"])
    return vf.ToolEnv(
        tools=[library.search_pages, library.list_sections, library.read_section],
        dataset=train,
        eval_dataset=evaluation,
        system_prompt=SYSTEM_PROMPT,
        parser=parser,
        rubric=vf.Rubric(funcs=[correct, format_has_answer], weights=[1.0, 0.0], parser=parser),
        max_turns=max_turns,
        demonstrate=demonstrate,
    )
