"""`mettle hub init`: what ships is published once, and belongs to a team of the Hub's admins."""

from __future__ import annotations

from mettle.envs.packages.registry import SHIPPED
from mettle.hub import shipped


def test_what_ships_is_published_once(hub, tmp_path):
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "reverse_text").symlink_to(SHIPPED / "reverse_text")
    told = []
    assert shipped.publish_shipped(hub.lab, lambda *each: told.append(each), folder) == 1
    assert shipped.publish_shipped(hub.lab, lambda *each: told.append(each), folder) == 0
    assert told == [("mettle/reverse-text@0.1.0", "published"), ("mettle/reverse-text@0.1.0", "there already")]
    found = hub.anonymous().get("/api/v1/environmentshub/").json()["data"]
    assert [(e["owner"]["name"], e["name"], e["visibility"]) for e in found] == [("mettle", "reverse-text", "PUBLIC")]
    assert "Reverse" in hub.anonymous().get("/environments/mettle/reverse-text").text
    assert [t["slug"] for t in hub.with_token("ann").get("/api/v1/user/teams").json()["data"]] == ["mettle"]
