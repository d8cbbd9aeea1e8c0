"""The encyclopedia, its questions, its tools, and what counts as an answer."""

from __future__ import annotations

import json
import sys

import pytest

from mettle.envs import Demonstrator, load_environment


@pytest.fixture(scope="module")
def env():
    return load_environment("wiki-search")


@pytest.fixture(scope="module")
def library(env):
    return next(iter(env.tool_map.values())).__self__


def test_every_answer_stands_on_the_last_page_of_its_path(env, library):
    for row in [*env.get_dataset(n=200), *env.get_eval_dataset()]:
        path = row["info"]["path"]
        assert len(path) == row["info"]["num_hops"]
        for title, following in zip(path, [*path[1:], row["answer"]], strict=True):
            assert following in " ".join(library.pages[title].values())


def test_a_question_has_one_answer_and_stands_in_one_split(env):
    train, evaluation = env.get_dataset()["question"], env.get_eval_dataset()["question"]
    assert len(set(train)) == len(train) == 1000
    assert not set(train) & set(evaluation)


async def test_the_demonstration_finds_its_way_through_the_tools(env):
    for row in env.get_eval_dataset(n=10):
        state = await env.run_rollout(row, Demonstrator(env), "gold")
        assert state["reward"] == 1.0
        assert state["metrics"]["search_pages_calls"] == row["info"]["num_hops"]
        read = " ".join(m["content"] for m in state["completion"] if m["role"] == "tool")
        assert row["answer"] in read


def test_a_page_is_found_by_its_title_and_by_what_it_says(library):
    for title, sections in list(library.pages.items())[:40]:
        assert library.search_pages(title).splitlines()[0] == title
        assert title in library.search_pages(" ".join(sections.values())).splitlines()


@pytest.mark.parametrize("asked", ["", "zzzz", "'; drop table", "a" * 10_000, "\ud800"])
def test_tools_answer_whatever_they_are_asked(library, asked):
    assert "try other words" in library.search_pages(asked)
    assert "there is no page" in library.list_sections(asked)
    assert "there is no section" in library.read_section(asked)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<answer>Stane Rol</answer>", 1),
        ("<answer>the stane rol.</answer>", 1),
        ("<answer>Stane Rol or Dove</answer>", 0),
        ("<answer></answer>", 0),
        ("Stane Rol", 0),
        ("", 0),
    ],
)
def test_only_the_answer_itself_counts(env, text, score):
    module = sys.modules["wiki_search"]
    completion = [
        {"role": "assistant", "content": "<answer>Stane Rol</answer>" if not score else ""},
        {"role": "assistant", "content": text},
    ]
    assert module.correct(completion, "Stane Rol", env.parser) == score


def test_a_corpus_of_ones_own(tmp_path):
    pages = [{"title": "Tea", "text": "Tea is drunk hot."}, {"title": "Ice", "sections": {"Use": "Ice is cold."}}]
    question = {"question": "How is tea drunk?", "answer": "hot"}
    for name, rows in (("pages", pages), ("train", [question]), ("eval", [question])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    env = load_environment("wiki-search", corpus=str(tmp_path))
    assert env.tool_map["list_sections"]("Ice") == "Ice:Use"
    assert env.tool_map["read_section"]("Tea:Text") == "Tea is drunk hot."
    assert env.get_dataset()[0]["answer"] == "hot"
    (tmp_path / "eval.jsonl").unlink()
    with pytest.raises(RuntimeError, match=r"eval\.jsonl is missing"):
        load_environment("wiki-search", corpus=str(tmp_path))


def test_wrong_hops_are_refused():
    with pytest.raises(RuntimeError, match="not"):
        load_environment("wiki-search", hops=[4])
