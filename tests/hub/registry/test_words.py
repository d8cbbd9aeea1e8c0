"""Words of environments: the same grammar on both databases, kept in step, ranked, from every earlier schema."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from tests.hub.archives_made import push, source
from tests.hub.lab_writer import HubWriter
from tests.hub.postgres_made import KINDS, hub_on

from mettle.hub import backup
from mettle.hub.database import HubDatabase, _script
from mettle.hub.registry import words

HUB = "/api/v1/environmentshub/"
HOSTILE = [
    '"', '""', '"""', "'", "''", "' OR 1=1 --", "a' & 'b", "a:*", "!a", "a & | b", "NEAR(a b)", "a AND", "OR", "NOT a",
    "name:poker", "-poker", "^poker", "poker*", "*", "(", "((poker", "{poker}", "po\0ker", "\ud800", "\\", "a\\'b",
    "<->", "%", "_", "\N{SNOWMAN}", "\N{ADLAM CAPITAL LETTER ALIF}", words.END, "x" * 100_000, "a " * 50_000, '"' * 9000,
    "0x1f 1e5 a.b.c a@b.c http://a.b/c?d=e", "\u0130\u1e9e\ufb01", "\N{COMBINING ACUTE ACCENT}", "1\N{FRACTION SLASH}2",
]  # fmt: skip


@pytest.fixture(params=KINDS)
def writer(request, tmp_path):
    with hub_on(request.param, tmp_path / "hub") as made:
        yield made


def pushed(client, name, readme="# Read me", version="0.1.0", **more):
    files = {"README.md": readme.encode()}
    assert push(client, name, version, source_bytes=source(name, version, files=files), **more).status_code == 200


def names(client, asked, **params):
    answer = client.get(HUB, params={"search": asked, **params})
    assert answer.status_code == 200, answer.text
    found = [each["name"] for each in answer.json()["data"]]
    assert len(found) == answer.json()["total_count"]
    return found


def test_words_phrases_and_beginnings_are_found_and_ranked(writer):
    bob = writer.with_token("bob")
    pushed(bob, "far-poker", "Cards. " * 300 + "Also a game of poker, in na\u00efve caf\u00e9s.", visibility="PUBLIC")
    pushed(bob, "near-cards", "Poker is all that it is: poker.", visibility="PUBLIC")
    pushed(bob, "chess", "A game for two.", visibility="PUBLIC")
    anybody = writer.anonymous()
    assert names(anybody, "poker") == ["far-poker", "near-cards"], "a name weighs more than a text"
    assert names(anybody, "poker", sort_order="asc") == ["near-cards", "far-poker"]
    assert names(anybody, "POK gam") == ["far-poker"]
    assert names(anybody, "oker") == []
    assert names(anybody, "NAIVE CAF\u00c9S") == ["far-poker"]
    assert names(anybody, '"game of"') == ["far-poker"]
    assert names(anybody, '"of game"') == []
    assert names(anybody, '"game o"') == [], "in a phrase, words are whole"
    assert names(anybody, "far-poker") == ["far-poker"], "what is joined by a mark stands beside each other"
    assert names(anybody, "poker-far") == []
    assert names(anybody, '"bob chess"') == ["chess"]
    assert names(anybody, '"chess a"') == [], "no phrase reaches from one part into the next"
    assert names(anybody, "bob", sort_by="name", sort_order="asc") == ["chess", "far-poker", "near-cards"]
    assert "near-cards" in anybody.get("/environments?words=poker").text
    assert "No environment fits" in anybody.get("/environments?words=***").text


def test_what_is_found_follows_the_releases(writer):
    bob = writer.with_token("bob")
    pushed(bob, "my-task", "Alpha.", visibility="PUBLIC")
    pushed(bob, "my-task", "Beta.", "0.2.0")
    assert (names(bob, "alpha"), names(bob, "beta")) == ([], ["my-task"])
    bob.post(f"{HUB}bob/my-task/@0.2.0/yank", json={"reason": "wrong"})
    assert (names(bob, "alpha"), names(bob, "beta")) == (["my-task"], [])
    with writer.lab.database.write() as c:
        key = c.scalar(text("SELECT id FROM environments"))
        words.keep_tasks(c, key, ["How many gammas?", "And deltas?"])
    assert names(bob, "deltas") == ["my-task"]
    bob.delete(f"{HUB}bob/my-task/@0.1.0")
    assert names(bob, "alpha") == []
    bob.post(f"{HUB}bob/my-task/@0.2.0/yank", json={"reason": None})
    assert names(bob, "beta deltas") == ["my-task"]
    bob.delete(f"{HUB}bob/my-task/@0.2.0")
    assert names(bob, "") == [], "what has no release is in no list"
    bob.delete(f"{HUB}bob/my-task")
    with writer.lab.database.read() as c:
        assert c.scalar(text("SELECT count(*) FROM environment_texts")) == 0
    assert names(bob, "bob") == []


def test_nothing_that_is_asked_for_is_an_error(writer):
    bob = writer.with_token("bob")
    pushed(bob, "my-task", " ".join(each[:2000] for each in HOSTILE).replace("\ud800", ""), visibility="PUBLIC")
    for asked in HOSTILE:
        if asked != "\ud800":  # no address can hold it
            sent = asked[:20_000]  # nor, in this client, more than 64 KiB
            assert bob.get(HUB, params={"search": sent}).status_code == 200, asked[:50]
            assert bob.get("/environments", params={"words": sent}).status_code in (200, 422), asked[:50]
        with writer.lab.database.read() as c:
            found = words.found(c, asked)
            if found is not None:
                c.execute(found.select()).all()
    assert names(bob, 'my "task"') == ["my-task"]

    @given(st.text(max_size=60))
    @settings(max_examples=60, deadline=None, database=None)
    def ask(asked):
        with writer.lab.database.read() as c:
            found = words.found(c, asked)
            assert (found is None) == (not words.parse(asked))
            if found is not None:
                c.execute(found.select()).all()

    ask()


@given(st.text(max_size=80))
@settings(max_examples=100, deadline=None)
def test_a_word_is_letters_and_digits_and_a_second_cut_changes_nothing(said):
    found = words.words_of(said)
    assert all(word.isalnum() and len(word) <= words.MAX_WORD for word in found)
    assert words.words_of(" ".join(found)) == found
    for word in found:
        assert words.parse(word) == [words.Term((word,), is_open=True)]


def test_every_earlier_schema_leads_here_with_its_rows(tmp_path):
    revisions = [each.revision for each in reversed(list(_script()[1].walk_revisions()))]
    assert revisions[0] == "0001"
    for revision in revisions[:-1]:
        folder = tmp_path / revision
        folder.mkdir()
        database = HubDatabase.in_folder(folder)
        database.migrate(revision)
        with database.write() as c:
            _rows_of_then(c, has_registry=revision >= "0002", is_described=revision >= "0007")
        database.migrate()
        hub = HubWriter(folder)
        assert names(hub.anonymous(), "poker") == (["cards"] if revision >= "0002" else [])
        database.close()
        hub.close()


def _rows_of_then(c, *, has_registry, is_described):
    """A person, and a published environment where the schema has such; as an earlier release would have left them."""
    c.execute(text("INSERT INTO owners VALUES ('o', 'ann', 'person', 'Ann', 1)"))
    c.execute(text("INSERT INTO people VALUES ('o', '', 'x', true, false)"))
    if not has_registry:
        return
    told = {"id": "e", "owner_id": "o", "name": "cards", "visibility": "PUBLIC", "description": "A game.",
            "tags": json.dumps(["x"]), "forked_from": "", "num_downloads": 0, "created_at": 1, "updated_at": 1}  # fmt: skip
    release = dict.fromkeys(
        ("content_hash", "yanked_reason", "published_by", "wheel_name", "wheel_sha256", "wheel_key", "wheel_metadata",
         "source_name", "source_sha256", "source_key", "card_state", "card_log"), ""
    ) | {"id": "r", "environment_id": "e", "version": "0.1.0", "state": "ready", "is_yanked": False, "metadata": "{}",
         "readme": "It is about poker.", "wheel_bytes": 1, "source_bytes": 1, "created_at": 1}  # fmt: skip
    for table, row in (("environments", told), ("releases", release)):
        c.execute(text(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(f':{name}' for name in row)})"), row)
    if is_described:
        c.execute(text("UPDATE environments SET version = '0.1.0'"))
        c.execute(text("INSERT INTO environment_texts VALUES (1, 'e', 'ann cards', 'a game', 'poker', '')"))


def test_a_restored_hub_finds_the_same(tmp_path):
    hub = HubWriter(tmp_path / "hub")
    hub.person("bob")
    pushed(hub.with_token("bob"), "my-task", "Alpha.", visibility="PUBLIC")
    backup.back_up(hub.lab, tmp_path / "hub.tar")
    backup.restore(tmp_path / "hub.tar", tmp_path / "again")
    again = HubWriter(tmp_path / "again")
    assert names(again.anonymous(), "alpha") == ["my-task"]
    assert push(again.with_token("bob"), version="0.2.0").status_code == 200
    assert (names(again.anonymous(), "alpha"), names(again.anonymous(), "what it is")) == ([], ["my-task"])
    hub.close()
    again.close()
