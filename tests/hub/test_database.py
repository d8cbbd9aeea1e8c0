"""The database: its migrations lead to the tables that are described, and what it cannot keep it keeps none of."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from tests.hub.lab_writer import differences, everything, room_for

from mettle.errors import StorageError, UserError
from mettle.hub.accounts import audit, people
from mettle.hub.database import HubDatabase, _script


@pytest.fixture
def database(tmp_path):
    made = HubDatabase.in_folder(tmp_path)
    made.migrate()
    yield made
    made.close()


def test_the_migrations_lead_to_the_tables_that_are_described(database):
    with database.read() as c:
        assert differences(c) == []
    database.migrate()  # a second start finds nothing to do


def test_the_newest_schema_is_the_head_of_the_migrations():
    assert HubDatabase.newest_schema() == _script()[1].get_current_head()


def test_a_database_of_a_later_release_is_refused(database):
    with database.write() as c:
        c.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StorageError, match="of a later release of Mettle"):
        database.migrate()


def test_a_block_that_fails_keeps_nothing(database):
    before = everything(database)

    def fail():
        with database.write() as c:
            people.create_person(c, "ann", "hash")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert everything(database) == before


def test_on_a_full_disk_each_statement_fails_in_one_line_and_keeps_nothing(database):
    before, refusals = everything(database), []
    for pages in range(200):
        said = _fill(database, pages)
        if said is None:
            break
        refusals.append(said)
        assert everything(database) == before
    assert len(refusals) > 5
    assert all("full" in said and "\n" not in said for said in refusals)
    assert len(everything(database)["people"]) == 40


def _fill(database, pages):
    """What the database says to 80 statements that have room for so many pages; None when it keeps them."""
    try:
        with room_for(database, pages), database.write() as c:
            for number in range(40):
                people.create_person(c, f"person-{number}", "h" * 190, email="e" * 190)
                audit.note(c, "ann", "person.create", f"person-{number}", detail="d" * 500)
    except StorageError as error:
        return str(error)
    return None


def test_an_address_that_is_none_is_refused():
    with pytest.raises(UserError, match="is no address"):
        HubDatabase("nonsense")
