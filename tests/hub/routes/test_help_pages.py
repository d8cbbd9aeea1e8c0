"""The Hub's pages about itself: commands with its own address, every route for programs, and settings without secrets."""

import re

from mettle.hub.oidc.config import OidcConfig
from mettle.hub.oidc.provider import OidcProvider


def test_the_docs_have_this_hubs_address_and_every_route_for_programs(hub):
    text = hub.anonymous().get("/docs").text
    assert "mettle login http://hub.test" in text
    shown = set(re.findall(r'<td class="mono">([A-Z]+ [^<]+)</td>', text))
    told = hub.anonymous().get("/api/v1/openapi.json").json()["paths"]
    assert shown == {f"{method.upper()} {path}" for path, methods in told.items() for method in methods}


def test_the_settings_are_for_admins_and_hold_nothing_that_opens_something(hub):
    config = OidcConfig(issuer="https://id.example", client_id="mettle", client_secret="open sesame", name="Example")
    hub.lab.provider = OidcProvider(config)
    text = hub.signed_in("ann").get("/settings").text
    assert "https://id.example" in text
    assert "SQLite, in the folder" in text
    assert "open sesame" not in text
    assert hub.signed_in("bob").get("/settings").status_code == 403
