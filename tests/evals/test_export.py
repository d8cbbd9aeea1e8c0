"""An evaluation as a page that asks nobody for anything, and as a table."""

from __future__ import annotations

import csv
import json
import re
from importlib.resources import files

import pytest
from tests.browsing import chromium, needs_browser, playwright
from tests.evals.conftest import row_of

from mettle.errors import StorageError
from mettle.evals.export.page import write_page
from mettle.evals.export.table import write_csv, write_parquet
from mettle.evals.export.theme import style
from mettle.evals.reader import EvaluationReader

HOSTILE = (
    "</script><script>document.title = 'owned'</script><!-- <img src=x onerror=\"document.title = 'owned'\"> "
    "\u2028 \ud800 {{title}} {{data}} {{policy}} &lt;b&gt;"
)


@pytest.fixture
def hostile(saved) -> EvaluationReader:
    """An evaluation in which everything that others wrote tries to become markup."""
    metadata = {"env_id": HOSTILE, "model": HOSTILE, "env_args": {HOSTILE: HOSTILE}, "sampling_args": {}}
    folder = saved([[1.0], [0.0], [None]], metadata=metadata)
    call = json.dumps({"id": "1", "name": HOSTILE, "arguments": HOSTILE})
    said = [{"role": HOSTILE, "content": HOSTILE, "reasoning_content": HOSTILE, "tool_calls": [call]}]
    fields = {"completion": said, "answer": HOSTILE, "info": {HOSTILE: HOSTILE}, "metrics": {HOSTILE: 1.0}}
    error = {"error": HOSTILE, "message": HOSTILE, "kind": HOSTILE}
    rows = [row_of(0, 1.0, **fields, stop_condition=HOSTILE), row_of(1, 0.0), row_of(2, None, error=error)]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvaluationReader(folder)


def test_the_page_holds_everything_and_names_nobody_else(hostile, tmp_path):
    write_page(hostile, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "default-src &#x27;none&#x27;" in text
    assert not re.search(r"""(src|href|action)\s*=\s*["']?(https?:)?//""", text)
    assert "@import" not in text
    assert "url(" not in text
    pieces = re.findall(r'<script type="application/json" id="([^"]+)">(.*?)</script>', text, re.DOTALL)
    assert [name for name, _ in pieces] == ["summary", "rollout-0", "rollout-1", "rollout-2"]
    assert json.loads(pieces[1][1])["messages"][1]["text"] == HOSTILE
    assert text.count("<script") == len(pieces) + 1, "nothing that somebody said became an element"
    summary = json.loads(pieces[0][1])
    named = HOSTILE.encode(errors="backslashreplace").decode()  # UTF-8 cannot hold half a surrogate pair
    assert (summary["metadata"]["model"], len(summary["rollouts"]), len(summary["tasks"])) == (named, 3, 3)
    assert sum(bar["count"] for bar in summary["bars"]) == 2


def test_tasks_stand_in_their_order_whichever_finished_first(saved, tmp_path):
    folder = saved([[1.0]])
    rows = [row_of(task, 1.0) for task in (10, 2, 33)] + [row_of("b", 1.0)]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_page(EvaluationReader(folder), tmp_path / "page.html")
    summary = re.search(r'id="summary">(.*?)</script>', (tmp_path / "page.html").read_text(), re.DOTALL)
    assert summary is not None
    assert [task["id"] for task in json.loads(summary[1])["tasks"]] == [2, 10, 33, "b"]


def test_a_page_may_leave_conversations_out(hostile, tmp_path):
    write_page(hostile, tmp_path / "page.html", num_rollouts=1)
    text = (tmp_path / "page.html").read_text()
    assert 'id="rollout-0"' in text
    assert 'id="rollout-1"' not in text


@pytest.mark.e2e
@needs_browser
def test_in_a_browser_hostile_text_is_text_and_search_finds_it(hostile, tmp_path):
    expect = playwright().expect
    write_page(hostile, tmp_path / "page.html")
    with chromium() as browser:
        page = browser.new_context().new_page()
        wrong, asked = [], []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "page.html").as_uri())
        expect(page.locator("#rollouts tr")).to_have_count(3)
        expect(page.locator("#tasks tr")).to_have_count(3)
        expect(page.locator("#figures")).to_contain_text("95 % interval")
        page.locator("#search").fill("ANSWER 1")
        expect(page.locator("#rollouts tr")).to_have_count(1)
        page.locator("#search").fill("onerror")
        expect(page.locator("#rollouts tr")).to_have_count(2)
        page.locator("#rollouts tr").first.click()
        expect(page.locator("#body")).to_contain_text("document.title = 'owned'")
        expect(page.locator("#body img")).to_have_count(0)
        page.locator("#one").press("ArrowRight")
        expect(page.locator("#which")).to_contain_text("rollout 2")
        page.locator("#close").click()
        page.locator("#search").fill("")
        page.locator("#only").select_option("failed")
        expect(page.locator("#rollouts tr")).to_have_count(1)
        page.locator("#tasks tr").nth(1).click()
        expect(page.locator("#search")).to_have_value("task:1")
        assert page.title() != "owned"
        assert wrong == []
        assert asked == [(tmp_path / "page.html").as_uri()], "the page asked for nothing but itself"


def test_a_table_has_a_line_for_each_rollout_and_no_formulas(saved, tmp_path):
    folder = saved([[1.0, None]])
    rows = [row_of(0, 1.0, answer="=1+1"), row_of(0, None, answer='a,"b"\nc \ud800')]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_csv(EvaluationReader(folder), tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["reward"], first["metric.right"], first["answer"], first["cause"]) == ("1.0", "1.0", "'=1+1", "")
    assert (second["reward"], second["cause"], second["answer"]) == ("", "provider", 'a,"b"\nc \\ud800')
    assert json.loads(first["prompt"]) == [{"role": "user", "content": "question 0"}]


def test_the_same_table_as_parquet(saved, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    reader = EvaluationReader(saved([[1.0, None], [0.25, 0.0]]))
    write_parquet(reader, tmp_path / "t.parquet")
    table = parquet.read_table(tmp_path / "t.parquet").to_pydict()
    assert table["reward"] == [1.0, None, 0.25, 0.0]
    assert table["example_id"] == [0, 0, 1, 1]
    assert table["cause"] == [None, "provider", None, None]
    assert table["is_truncated"] == [False] * 4
    assert json.loads(table["completion"][0])[0]["content"] == "answer 0"


@pytest.mark.parametrize("write", [write_page, write_csv])
def test_a_file_that_cannot_be_written_is_named(saved, tmp_path, write):
    with pytest.raises(StorageError, match=r"cannot write .*none"):
        write(EvaluationReader(saved([[1.0]])), tmp_path / "none" / "file")


def test_what_is_handed_over_has_the_tones_of_the_hub():
    """One product: a page in a file and a page of the server are told apart by nothing but the address."""
    hub = files("mettle.hub").joinpath("static", "style.css").read_text()
    light, dark = (dict(re.findall(r"(--[\w-]+): ([^;]+);", part)) for part in hub.split('[data-theme="dark"]')[:2])
    mine = [dict(re.findall(r"(--[\w-]+): ([^;]+);", part)) for part in style().split("prefers-color-scheme: dark")]
    for theirs, own in ((light, mine[0]), (dark, mine[1])):
        tones = {name: value for name, value in own.items() if name not in ("--sans", "--mono")}
        assert len(tones) > 8
        assert tones == {name: theirs[name] for name in tones}
