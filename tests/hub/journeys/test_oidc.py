"""Signing in through a provider: who gets in, whose account it is, and each way to cheat that is known."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from pydantic import ValidationError
from sqlalchemy import select
from tests.hub.lab_writer import PASSWORD, everything
from tests.hub.provider_made import (
    CLIENT,
    SECRET,
    SigningKey,
    made_provider,
    rsa_key,
    signed_with_secret,
    unsigned,
)

from mettle.hub import tables
from mettle.hub.oidc.config import OidcConfig
from mettle.hub.oidc.provider import FRESH_S, KEYS_AGAIN_S, OidcProvider

DAY_S = 86_400


@pytest.fixture
def provider():
    with made_provider() as made:
        yield made


@pytest.fixture
def here(hub, provider):
    """The Hub with the provider; everybody whom it signs in gets an account."""
    settle(hub, provider)
    return hub


def settle(hub, provider, **settings):
    told = {"issuer": provider.url, "client_id": CLIENT, "client_secret": SECRET, "new_people": "everybody"}
    clock = Clock()
    if hub.lab.provider is not None:
        hub.lab.provider.close()
    hub.lab.provider = OidcProvider(OidcConfig(**{**told, **settings}), clock=clock, now=clock.now)
    return clock


def sent_back(url):
    """Where the provider sends a browser back to. No certificates are read for it: that takes longer than a test."""
    with httpx.Client(verify=False) as client:
        return client.get(url).headers["location"]


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        import time

        self.passed, self.began = 0.0, time.time()

    def __call__(self):
        return self.passed

    def now(self):
        return self.began + self.passed


def go(browser, following="/account"):
    """To the provider and to where it sends the browser back, which is not followed."""
    there = browser.get("/signin/oidc", params={"next": following}, follow_redirects=False)
    assert there.status_code == 303, there.text
    return sent_back(there.headers["location"])


def sign_in(browser, following="/account"):
    return browser.get(go(browser, following), follow_redirects=False)


def refusal(answer, status=403):
    assert answer.status_code == status, answer.text
    assert "mettle_session" not in answer.cookies
    return re.search(r'role="alert"[^>]*>(.*?)</', answer.text, re.S)[1]


def audit_of(hub):
    with hub.lab.database.read() as c:
        return [
            tuple(row) for row in c.execute(select(tables.audit.c.actor, tables.audit.c.action, tables.audit.c.detail))
        ]


def count(hub, table):
    return len(everything(hub.lab.database)[table])


def test_the_first_sign_in_makes_an_account_and_the_next_opens_it(here, provider):
    browser = here.anonymous()
    assert "Continue with 127.0.0.1" in browser.get("/signin?next=/teams").text
    answer = sign_in(browser, "/teams")
    assert (answer.status_code, answer.headers["location"]) == (303, "/teams")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "dora@example.org" in browser.get("/account").text
    before = count(here, "people")
    provider.user |= {"email": "dora@another.org", "preferred_username": "other"}
    again = here.anonymous()
    assert sign_in(again).status_code == 303
    assert "dora@example.org" in again.get("/account").text, "the subject says who it is, not the e-mail"
    assert count(here, "people") == before
    assert count(here, "sign_ins") == 0
    assert [row[:2] for row in audit_of(here)][-3:] == [
        ("dora", "join.oidc"), ("dora", "session.open"), ("dora", "session.open"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("told", "slug"),
    [
        ({"preferred_username": "Dora.D"}, "dora-d"), ({"preferred_username": "bob"}, "bob-2"),
        ({"email": "!!!@example.org", "name": ""}, "person"), ({"preferred_username": "x" * 80}, "x" * 30),
        ({"preferred_username": "dora@corp.example"}, "dora"),
    ],
)  # fmt: skip
def test_a_new_name_is_like_the_providers_and_nobody_elses(here, provider, told, slug):
    provider.user |= told
    browser = here.anonymous()
    assert sign_in(browser).status_code == 303
    with here.lab.database.read() as c:
        assert c.scalar(select(tables.owners.c.slug).order_by(tables.owners.c.created_at.desc())) == slug


def test_whoever_has_no_account_stays_outside_by_default(hub, provider):
    settle(hub, provider, new_people="nobody")
    before = count(hub, "people")
    assert "ask an admin" in refusal(sign_in(hub.anonymous()))
    assert count(hub, "people") == before
    assert audit_of(hub)[-1][:2] == ("nobody", "session.refused")


@pytest.mark.parametrize(
    ("told", "is_in"),
    [
        ({}, True), ({"email": "dora@EXAMPLE.org"}, True), ({"email_verified": "true"}, True),
        ({"email_verified": False}, False), ({"email_verified": None}, False), ({"email": "d@sub.example.org"}, False),
        ({"email": "d@example.org.evil.test"}, False), ({"email": "d@evil.test@example.org"}, False), ({"email": None}, False),
        ({"email": ["d@example.org"]}, False),
    ],
)  # fmt: skip
def test_a_domain_lets_in_verified_emails_of_its_own(hub, provider, told, is_in):
    settle(hub, provider, new_people="domains", domains=["Example.org"])
    provider.user |= told
    assert sign_in(hub.anonymous()).status_code == (303 if is_in else 403)


def test_an_email_opens_an_account_only_by_the_operators_word_and_verified(hub, provider):
    with hub.lab.database.write() as c:
        c.execute(tables.people.update().values(email=""))
        bob = c.scalar(select(tables.owners.c.id).where(tables.owners.c.slug == "bob"))
        c.execute(tables.people.update().where(tables.people.c.id == bob).values(email="Dora@example.org"))
    old_session, old_token = hub.signed_in("bob"), hub.with_token("bob")
    settle(hub, provider, new_people="nobody")
    refusal(sign_in(hub.anonymous()))
    settle(hub, provider, new_people="nobody", link_by_email=True)
    provider.user["email_verified"] = False
    refusal(sign_in(hub.anonymous()))
    assert old_session.get("/account", follow_redirects=False).status_code == 200
    provider.user["email_verified"] = True
    browser = hub.anonymous()
    assert sign_in(browser).status_code == 303
    assert "<h1>bob</h1>" in browser.get("/account").text
    # Whoever entered that e-mail here may have been somebody else: what opened the account is closed.
    assert old_session.get("/account", follow_redirects=False).status_code == 303
    assert old_token.get("/api/v1/user/whoami").status_code == 401
    assert hub.anonymous().post("/signin", data={"username": "bob", "password": PASSWORD}).status_code == 401
    assert ("bob", "identity.link") in [row[:2] for row in audit_of(hub)]
    # Another identity with the same e-mail is somebody else now.
    provider.user["sub"] = "u-2"
    refusal(sign_in(hub.anonymous()))


def test_an_email_that_two_accounts_have_opens_neither(hub, provider):
    with hub.lab.database.write() as c:
        c.execute(tables.people.update().values(email="dora@example.org"))
    settle(hub, provider, new_people="nobody", link_by_email=True)
    refusal(sign_in(hub.anonymous()))


def test_an_account_that_is_shut_stays_shut(here, provider):
    assert sign_in(here.anonymous()).status_code == 303
    with here.lab.database.write() as c:
        c.execute(tables.people.update().values(is_disabled=True))
    assert "shut" in refusal(sign_in(here.anonymous()))


def test_an_identity_is_added_to_an_account_and_taken_away(hub, provider):
    settle(hub, provider, new_people="nobody")
    bob = hub.signed_in("bob")
    there = bob.form("/account/identities")
    url = re.search(r'href="(http://127[^"]+)"', there.text)[1].replace("&amp;", "&")
    back = sent_back(url)
    assert bob.get(back, follow_redirects=False).headers["location"] == "/account"
    page = bob.get("/account").text
    assert f'value="{provider.url}"' in page
    browser = hub.anonymous()
    assert sign_in(browser).status_code == 303
    assert "<h1>bob</h1>" in browser.get("/account").text
    assert bob.form("/account/identities/remove", issuer=provider.url, subject="another").status_code == 400
    assert bob.form("/account/identities/remove", issuer=provider.url, subject="u-1").status_code == 303
    refusal(sign_in(hub.anonymous()))
    assert {"identity.link", "identity.remove"} <= {row[1] for row in audit_of(hub)}


def test_an_identity_is_added_by_the_session_that_asked_alone(hub, provider):
    settle(hub, provider, new_people="nobody")
    bob = hub.signed_in("bob")
    assert bob.post("/account/identities", data={"csrf": "wrong"}).status_code == 403
    url = re.search(r'href="(http://127[^"]+)"', bob.form("/account/identities").text)[1].replace("&amp;", "&")
    back = sent_back(url)
    bob.form("/signout")
    refusal(bob.get(back, follow_redirects=False))
    assert count(hub, "identities") == 0


def test_an_identity_of_one_account_is_not_added_to_another(here, provider):
    assert sign_in(here.anonymous()).status_code == 303
    bob = here.signed_in("bob")
    url = re.search(r'href="(http://127[^"]+)"', bob.form("/account/identities").text)[1].replace("&amp;", "&")
    assert "opens the account" in refusal(bob.get(sent_back(url), follow_redirects=False))


def test_the_only_way_in_is_not_taken_away(here, provider):
    browser = here.anonymous()
    assert sign_in(browser).status_code == 303
    page = browser.get("/account").text
    browser.csrf = re.search(r'name="csrf" value="([^"]+)"', page)[1]
    assert "You have none" in page, "no password"
    answer = browser.form("/account/identities/remove", issuer=provider.url, subject="u-1")
    assert answer.status_code == 400
    assert "the only way" in answer.text
    for password in ("", PASSWORD):
        answer = here.anonymous().post("/signin", data={"username": "dora", "password": password})
        assert answer.status_code == 401, "no password opens an account that has none"


def test_rsa_and_keys_that_follow_each_other(hub, provider):
    clock = settle(hub, provider)
    provider.keys = [rsa_key("one")]
    assert sign_in(hub.anonymous()).status_code == 303
    for _ in range(3):
        assert sign_in(hub.anonymous()).status_code == 303
    assert provider.num_asked == {"discovery": 1, "keys": 1}
    provider.keys.append(SigningKey("ES256", "two"))
    refusal(sign_in(hub.anonymous()))  # its keys were asked for just now
    clock.passed += KEYS_AGAIN_S
    assert sign_in(hub.anonymous()).status_code == 303
    clock.passed += FRESH_S + 1
    gone = provider.keys.pop(0)
    provider.sign = gone.sign
    provider.claims = lambda claims: {**claims, "iat": int(clock.now()), "exp": int(clock.now()) + 300}
    refusal(sign_in(hub.anonymous()))
    assert provider.num_asked["discovery"] == 2


def test_unknown_keys_make_nobody_ask_the_provider_again_and_again(hub, provider):
    settle(hub, provider)
    other = SigningKey("ES256", "unknown")
    provider.sign = other.sign
    for _ in range(4):
        assert "does not list" in refusal(sign_in(hub.anonymous()))
    assert provider.num_asked["keys"] == 1


@pytest.mark.parametrize("kind", ["basic", "post", "public"])
def test_the_client_says_who_it_is_as_the_provider_wants(hub, provider, kind, monkeypatch):
    if kind == "post":
        provider.metadata["token_endpoint_auth_methods_supported"] = ["client_secret_post"]
    provider.has_secret = kind != "public"
    monkeypatch.setenv("METTLE_OIDC_CLIENT_SECRET", SECRET if provider.has_secret else "")
    settle(hub, provider, client_secret=None)
    assert sign_in(hub.anonymous()).status_code == 303


def test_a_wrong_client_secret_is_one_line(hub, provider):
    settle(hub, provider, client_secret="wrong")
    assert "invalid_client" in refusal(sign_in(hub.anonymous()))


def test_an_email_that_is_not_in_the_token_is_asked_for(hub, provider):
    settle(hub, provider, new_people="domains", domains=["example.org"])
    provider.user = {"sub": "u-1"}
    provider.userinfo = {"email": "dora@example.org", "email_verified": True, "sub": "somebody else"}
    refusal(sign_in(hub.anonymous()))
    provider.userinfo["sub"] = "u-1"
    assert sign_in(hub.anonymous()).status_code == 303


WRONG = {
    "another's nonce": {"nonce": "of another sign-in"}, "no nonce": {"nonce": None}, "another's audience": {"aud": "other"},
    "many audiences": {"aud": [CLIENT, "other"]}, "another party": {"aud": [CLIENT, "other"], "azp": "other"},
    "another issuer": {"iss": "https://evil.test"}, "run out": {"exp": 1_000_000}, "no end": {"exp": None},
    "of tomorrow": {"iat": 9_999_999_999}, "not yet": {"nbf": 9_999_999_999}, "nobody": {"sub": ""},
    "no subject": {"sub": None}, "endless subject": {"sub": "x" * 300}, "a number": {"sub": 7}, "words": {"exp": "soon"},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_token_that_is_not_for_this_sign_in_opens_nothing(here, provider, wrong):
    before = count(here, "people"), count(here, "sessions")
    changed = WRONG[wrong]
    provider.claims = lambda claims: {k: v for k, v in {**claims, **changed}.items() if v is not None}
    assert "ID token" in refusal(sign_in(here.anonymous()))
    assert (count(here, "people"), count(here, "sessions")) == before


def test_clocks_may_differ_by_a_minute(here, provider):
    provider.claims = lambda claims: {**claims, "iat": claims["iat"] + 30, "exp": claims["iat"] - 30}
    assert sign_in(here.anonymous()).status_code == 303
    provider.claims = lambda claims: {**claims, "exp": claims["iat"] - 90}
    refusal(sign_in(here.anonymous()))


def test_several_audiences_with_us_as_the_party_are_fine(here, provider):
    provider.claims = lambda claims: {**claims, "aud": ["other", CLIENT], "azp": CLIENT}
    assert sign_in(here.anonymous()).status_code == 303


FORGED = {
    "unsigned": lambda keys, claims: unsigned(claims),
    "unsigned, in capitals": lambda keys, claims: unsigned(claims, "NONE"),
    "no algorithm": lambda keys, claims: unsigned(claims, ""),
    "the client's secret": lambda keys, claims: signed_with_secret(claims, SECRET.encode(), keys[0].kid),
    "the public key as a secret": lambda keys, claims: signed_with_secret(claims, keys[0].public_pem(), keys[0].kid),
    "another key by its name": lambda keys, claims: SigningKey("ES256", keys[0].kid).sign(claims),
    "a key of its own": lambda keys, claims: (k := SigningKey("ES256", "own")).sign(claims, jwk=k.jwk()),
    "a key from elsewhere": lambda keys, claims: SigningKey("ES256", "own").sign(claims, jku="http://127.0.0.1:9/keys"),
    "a kind of key that is not the algorithm's": lambda keys, claims: rsa_key().sign(claims, kid=keys[0].kid),
    "changed words": lambda keys, claims: _with_other_claims(keys[0].sign(claims), {**claims, "sub": "u-9"}),
    "no signature": lambda keys, claims: keys[0].sign(claims).rpartition(".")[0] + ".",
    "a word that nobody knows": lambda keys, claims: keys[0].sign(claims, crit=["exp2"], exp2=1),
    "no token": lambda keys, claims: "nonsense",
    "five parts": lambda keys, claims: "a.b.c.d.e",
    "letters beyond ASCII": lambda keys, claims: "\u00e4.\u00e4.\u00e4",
}


def _with_other_claims(token, claims):
    import json

    from tests.hub.provider_made import b64

    head, _, signature = token.split(".")
    return f"{head}.{b64(json.dumps(claims))}.{signature}"


@pytest.mark.parametrize("forged", FORGED)
def test_a_token_that_the_provider_has_not_signed_opens_nothing(here, provider, forged):
    before = count(here, "people"), count(here, "sessions")
    provider.sign = lambda claims: FORGED[forged](provider.keys, claims)
    assert "ID token" in refusal(sign_in(here.anonymous()))
    assert (count(here, "people"), count(here, "sessions")) == before


def test_a_short_key_signs_nothing(here, provider):
    provider.keys = [rsa_key("short", 1024)]
    assert "does not list" in refusal(sign_in(here.anonymous()))


def test_an_algorithm_that_is_not_named_is_refused(hub, provider):
    settle(hub, provider, algorithms=["RS256"])
    assert "takes RS256" in refusal(sign_in(hub.anonymous()))


def test_a_browser_that_did_not_begin_a_sign_in_does_not_end_it(here):
    """An attacker ends a sign-in of their own in somebody else's browser (login CSRF)."""
    attacker, other = here.anonymous(), here.anonymous()
    back = go(attacker)
    assert "not begun in this browser" in refusal(other.get(back, follow_redirects=False))
    go(other)  # even one that is on its way itself
    refusal(other.get(back, follow_redirects=False))
    assert attacker.get(back, follow_redirects=False).status_code == 303, "and the attacker's is still there"


def test_an_address_to_come_back_to_works_once(here):
    browser = here.anonymous()
    back = go(browser)
    assert browser.get(back, follow_redirects=False).status_code == 303
    assert "not begun" in refusal(browser.get(back, follow_redirects=False))


def test_a_code_of_another_sign_in_is_refused_by_pkce(here, provider):
    """A stolen code, put into a sign-in that the thief began."""
    stolen = parse_qs(urlsplit(go(here.anonymous())).query)["code"][0]
    thief = here.anonymous()
    own = parse_qs(urlsplit(go(thief)).query)
    sent = urlencode({"code": stolen, "state": own["state"][0], "iss": provider.url})
    assert "invalid_grant" in refusal(thief.get(f"/signin/oidc/back?{sent}", follow_redirects=False))


@pytest.mark.parametrize("issuer", [None, "https://evil.test"])
def test_an_answer_of_another_provider_is_refused(here, issuer):
    browser = here.anonymous()
    query = {k: v[0] for k, v in parse_qs(urlsplit(go(browser)).query).items()}
    sent = {**query, "iss": issuer} if issuer else {k: v for k, v in query.items() if k != "iss"}
    assert "not of the provider" in refusal(browser.get("/signin/oidc/back", params=sent, follow_redirects=False))


@pytest.mark.parametrize("state", ["", "wrong", None, "x" * 4000])
def test_a_state_that_nobody_gave_out_is_refused(here, state):
    browser = here.anonymous()
    go(browser)
    sent = {"code": "x", **({} if state is None else {"state": state})}
    assert "not begun" in refusal(browser.get("/signin/oidc/back", params=sent, follow_redirects=False))


@pytest.mark.parametrize(
    "target", ["//evil.test", "https://evil.test", "/\\evil.test", "/a b", "/%0d", "evil", "/\t/evil.test"]
)
def test_signing_in_leads_nowhere_else(here, target):
    where = sign_in(here.anonymous(), target).headers["location"]
    assert where == ("/%0d" if target == "/%0d" else "/")


def test_who_signs_nobody_in_is_told_so(here):
    browser = here.anonymous()
    query = parse_qs(urlsplit(go(browser)).query)
    sent = {"error": "access_denied<b>", "state": query["state"][0], "iss": query["iss"][0]}
    said = refusal(browser.get("/signin/oidc/back", params=sent, follow_redirects=False))
    assert "access_denied&lt;b&gt;" in said


def test_who_tries_too_often_waits(here):
    browser = here.anonymous()
    codes = [browser.get("/signin/oidc", follow_redirects=False).status_code for _ in range(22)]
    assert codes[-1] == 429


def test_a_provider_that_does_not_answer_is_one_line_and_is_not_asked_at_once_again(hub, provider):
    settle(hub, provider, issuer="http://127.0.0.1:9", name="Nowhere")
    answer = hub.anonymous().get("/signin/oidc", follow_redirects=False)
    assert "does not answer" in refusal(answer, 503)
    assert hub.anonymous().get("/signin").status_code == 200, "passwords still work"


@pytest.mark.parametrize(
    "metadata",
    [
        {"issuer": "https://evil.test"}, {"token_endpoint": "http://evil.test/token"}, {"jwks_uri": None},
        {"authorization_endpoint": "javascript:alert(1)"}, {"token_endpoint": 7},
    ],
)  # fmt: skip
def test_a_provider_that_leads_elsewhere_is_refused(here, provider, metadata):
    provider.metadata = metadata
    refusal(here.anonymous().get("/signin/oidc", follow_redirects=False), 503)


def test_an_answer_without_an_end_is_refused(here, provider):
    provider.metadata = {"more": "x" * (2 << 20)}
    assert "longer than" in refusal(here.anonymous().get("/signin/oidc", follow_redirects=False), 503)


def test_without_a_provider_there_is_no_button(hub):
    assert "Continue with" not in hub.anonymous().get("/signin").text
    assert hub.anonymous().get("/signin/oidc", follow_redirects=False).status_code == 404


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"issuer": "http://id.example.org"}, "https"), ({"issuer": "id.example.org"}, "no address"),
        ({"client_id": ""}, "go together"), ({"scopes": ["email"]}, "openid"), ({"domains": ["example.org"]}, "go together"),
        ({"new_people": "domains"}, "go together"), ({"new_people": "domains", "domains": ["@example.org"]}, "no domain"),
        ({"algorithms": ["none"]}, "RS256"), ({"algorithms": ["HS256"]}, "RS256"), ({"algorithms": []}, "empty"),
        ({"redirect_url": "http://hub.example.org/signin/oidc/back"}, "https"), ({"isuer": "x"}, "isuer"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ValidationError, match=said):
        OidcConfig(**{"issuer": "https://id.example.org", "client_id": "hub", **settings})


def test_behind_a_proxy_with_tls_the_cookies_go_over_tls_alone(here, provider):
    provider.redirect_url = "https://hub.test/signin/oidc/back"
    browser = here.anonymous()
    headers = {"X-Forwarded-Proto": "https"}
    there = browser.get("/signin/oidc", headers=headers, follow_redirects=False)
    assert "Secure" in there.headers["set-cookie"]
    back = sent_back(there.headers["location"])
    cookie = there.headers["set-cookie"].partition(";")[0]
    path = back.removeprefix("https://hub.test")
    answer = browser.get(path, headers={**headers, "Cookie": cookie}, follow_redirects=False)
    assert answer.status_code == 303
    assert "Secure" in answer.headers["set-cookie"]
