"""The permission matrix: every route of a Hub with accounts, and everybody who may ask.

`ROUTES` has what a route is for, `MAY` who may do that; a route that is missing fails the test. What is asked for is a
private environment of the team robots: bob is its admin, kim a member, eve a stranger, ann the Hub's admin.
"""

from __future__ import annotations

import pytest
from fastapi.routing import APIRoute
from tests.hub.archives_made import push
from tests.hub.lab_writer import HubWriter

from mettle.hub.accounts.tokens import SCOPES

ENV = "/api/v1/environmentshub/robots/my-task"
REFUSED = {401, 403, 404}
WHEEL = {
    "content_hash": "1" * 64, "filename": "my_task-0.2.0-py3-none-any.whl", "size": 1, "sha256": "1" * 64,
    "semantic_version": "0.2.0",
}  # fmt: skip

RUN = {"model": "tiny", "environments": [{"id": "reverse-text"}], "batch_size": 32}

# What a route is for: (method, path as it is declared) -> (kind, path as it is asked, JSON body or form).
ROUTES: dict[tuple[str, str], tuple[str, str, dict | None]] = {
    ("POST", "/api/v1/auth_challenge/generate"): ("open", "", {}),
    ("GET", "/api/v1/auth_challenge/status"): ("secret", "?challenge=x", None),
    ("GET", "/api/v1/user/whoami"): ("anybody signed in", "", None),
    ("PATCH", "/api/v1/user/slug"): ("account write", "", {"slug": "renamed"}),
    ("GET", "/api/v1/user/teams"): ("account read", "", None),
    ("POST", "/api/v1/teams"): ("account write", "", {"slug": "another"}),
    ("GET", "/api/v1/teams/{team_id}/members"): ("members", "/api/v1/teams/TEAM/members", None),
    ("POST", "/api/v1/teams/{team_id}/members"): ("team admin", "/api/v1/teams/TEAM/members", {"user": "kim"}),
    ("DELETE", "/api/v1/teams/{team_id}/members/{person_id}"): ("team admin", "/api/v1/teams/TEAM/members/ANN", None),
    ("GET", "/api/v1/tokens"): ("account read", "", None),
    ("POST", "/api/v1/tokens"): ("account write", "", {"name": "t", "scopes": ["account:read"]}),
    ("DELETE", "/api/v1/tokens/{token_id}"): ("secret", "/api/v1/tokens/none", None),
    ("GET", "/api/v1/environmentshub/"): ("public read", "", None),
    ("POST", "/api/v1/environmentshub/resolve"): ("push", "", {"name": "my-task", "owner_slug": "robots"}),
    ("POST", "/api/v1/environmentshub/lookup"): ("read", "", {"id": "ENVIRONMENT"}),
    ("POST", "/api/v1/environmentshub/{environment_id}/wheels"): (
        "push", "/api/v1/environmentshub/ENVIRONMENT/wheels", WHEEL,
    ),
    ("POST", "/api/v1/environmentshub/{environment_id}/wheels/{wheel_id}/finalize"): (
        "push", "/api/v1/environmentshub/ENVIRONMENT/wheels/RELEASE/finalize", None,
    ),
    ("POST", "/api/v1/environmentshub/{environment_id}/versions"): (
        "push", "/api/v1/environmentshub/ENVIRONMENT/versions", WHEEL,
    ),
    ("POST", "/api/v1/environmentshub/{environment_id}/versions/{version_id}/finalize"): (
        "push", "/api/v1/environmentshub/ENVIRONMENT/versions/RELEASE/finalize", None,
    ),
    ("GET", "/api/v1/environmentshub/{owner}/{name}/versions"): ("read", f"{ENV}/versions", None),
    ("GET", "/api/v1/environmentshub/{owner}/{name}/status"): ("read", f"{ENV}/status", None),
    ("GET", "/api/v1/environmentshub/{owner}/{name}/@{version}"): ("read", f"{ENV}/@0.1.0", None),
    ("GET", "/api/v1/environmentshub/{owner}/{name}/@{version}/inspect"): ("read", f"{ENV}/@0.1.0/inspect", None),
    ("GET", "/api/v1/environmentshub/{owner}/{name}/difference"): ("read", f"{ENV}/difference?before=latest", None),
    ("GET", "/api/v1/environmentshub/{owner}/{name}/actions"): ("read", f"{ENV}/actions", None),
    ("GET", "/api/v1/environmentshub/{owner}/{name}/actions/{action_id}/logs"): ("read", f"{ENV}/actions/latest/logs", None),
    ("POST", "/api/v1/environmentshub/{owner}/{name}/actions/retry"): ("push", f"{ENV}/actions/retry", {}),
    ("GET", "/api/v1/environmentshub/{environment_id}/{kind}"): ("push", "/api/v1/environmentshub/ENVIRONMENT/secrets", None),
    ("POST", "/api/v1/environmentshub/{environment_id}/{kind}"): (
        "push", "/api/v1/environmentshub/ENVIRONMENT/variables", {"name": "A_WORD", "value": "said"},
    ),
    ("PATCH", "/api/v1/environmentshub/{environment_id}/{kind}/{secret_id}"): (
        "push", "/api/v1/environmentshub/ENVIRONMENT/secrets/SECRET", {"value": "another"},
    ),
    ("DELETE", "/api/v1/environmentshub/{environment_id}/{kind}/{secret_id}"): ("secret", "", None),
    ("GET", "/api/v1/secrets/"): ("environments write", "", None),
    ("POST", "/api/v1/secrets/"): ("environments write", "", {"name": "MY_KEY", "value": "sealed"}),
    ("POST", "/api/v1/variables/"): ("environments write", "", {"name": "MY_WORD", "value": "said"}),
    ("GET", "/api/v1/secrets/{secret_id}"): ("push", "/api/v1/secrets/SECRET", None),
    ("PATCH", "/api/v1/secrets/{secret_id}"): ("push", "/api/v1/secrets/SECRET", {"value": "another"}),
    ("DELETE", "/api/v1/secrets/{secret_id}"): ("secret", "", None),
    ("GET", "/secrets"): ("anybody signed in", "", None),
    ("GET", "/secrets/{owner}"): ("push page", "/secrets/robots", None),
    ("POST", "/secrets/{owner}"): ("member's session", "/secrets/robots", {"action": "secret", "name": "X_KEY", "value": "v"}),
    ("PUT", "/api/v1/environmentshub/{owner}/{name}/star"): ("read and write", f"{ENV}/star", None),
    ("DELETE", "/api/v1/environmentshub/{owner}/{name}/star"): ("read and write", f"{ENV}/star", None),
    ("POST", "/api/v1/environmentshub/{owner}/{name}/fork"): ("read and write", f"{ENV}/fork", {}),
    ("POST", "/api/v1/environmentshub/{owner}/{name}/@{version}/yank"): ("push", f"{ENV}/@0.1.0/yank", {"reason": None}),
    ("PATCH", "/api/v1/environmentshub/{owner}/{name}"): ("govern", ENV, {"visibility": "PRIVATE"}),
    ("DELETE", "/api/v1/environmentshub/{owner}/{name}/@{version}"): ("govern", f"{ENV}/@0.1.1", None),
    ("DELETE", "/api/v1/environmentshub/{owner}/{name}"): ("govern", ENV, None),
    ("GET", "/api/v1/evaluations/"): ("public evals", "", None),
    ("POST", "/api/v1/evaluations/"): ("evals write", "", {"name": "x", "environment": "words"}),
    ("GET", "/api/v1/evaluations/leaderboard"): ("public evals", "?environment=words", None),
    ("POST", "/api/v1/evaluations/compare"): ("secret", "", {}),
    ("GET", "/api/v1/evaluations/{result_id:result}"): ("own evals", "/api/v1/evaluations/RESULT", None),
    ("GET", "/api/v1/evaluations/{result_id:result}/samples"): ("own evals", "/api/v1/evaluations/RESULT/samples", None),
    ("POST", "/api/v1/evaluations/{result_id:result}/samples"): (
        "own evals write", "/api/v1/evaluations/RESULT/samples", {"samples": []},
    ),
    ("POST", "/api/v1/evaluations/{result_id:result}/finalize"): (
        "own evals write", "/api/v1/evaluations/RESULT/finalize", {},
    ),
    ("PUT", "/api/v1/evaluations/{result_id:result}"): ("own evals write", "/api/v1/evaluations/RESULT", {"name": "y"}),
    ("DELETE", "/api/v1/evaluations/{result_id:result}"): ("own evals write", "/api/v1/evaluations/RESULT", None),
    ("POST", "/api/v1/hosted-evaluations"): (
        "evals write", "", {"environment": "reverse-text", "inference_model": "m", "eval_config": {"api_base_url": "http://x.test/v1"}},
    ),
    ("GET", "/api/v1/hosted-evaluations/models"): ("evals write", "", None),
    ("GET", "/api/v1/hosted-evaluations/{result_id:result}/logs"): ("own evals write", "/api/v1/hosted-evaluations/HOSTED/logs", None),
    ("PATCH", "/api/v1/hosted-evaluations/{result_id:result}/cancel"): ("own evals write", "/api/v1/hosted-evaluations/HOSTED/cancel", None),
    ("GET", "/hosted-evaluations"): ("evals write", "", None),
    ("POST", "/hosted-evaluations"): ("session", "", {"environment": ""}),
    ("GET", "/hosted-evaluations/{result_id:result}"): ("own evals write", "/hosted-evaluations/HOSTED", None),
    ("POST", "/hosted-evaluations/{result_id:result}"): ("own evals' session", "/hosted-evaluations/HOSTED", {}),
    ("GET", "/evaluations"): ("open", "", None),
    ("GET", "/compare"): ("secret", "", None),
    ("GET", "/compare/file"): ("secret", "", None),
    ("POST", "/evaluations/{result_id:result}"): ("own evals' session", "/evaluations/RESULT", {"action": "unshare"}),
    ("GET", "/dashboard/evaluations/{result_id:result}"): ("open", "/dashboard/evaluations/RESULT", None),
    ("GET", "/api/v1/rft/models"): ("training read", "", None),
    ("POST", "/api/v1/rft/runs"): ("training write", "", RUN),
    ("GET", "/api/v1/rft/runs"): ("training read", "", None),
    ("GET", "/api/v1/rft/runs/{run_id}"): ("own runs", "/api/v1/rft/runs/JOB", None),
    ("DELETE", "/api/v1/rft/runs/{run_id}"): ("own runs write", "/api/v1/rft/runs/JOB", None),
    ("PUT", "/api/v1/rft/runs/{run_id}/restart"): ("own runs write", "/api/v1/rft/runs/JOB/restart", None),
    ("PUT", "/api/v1/rft/runs/{run_id}/stop"): ("own runs write", "/api/v1/rft/runs/JOB/stop", None),
    ("GET", "/api/v1/rft/runs/{run_id}/logs"): ("secret", "", None),
    ("GET", "/api/v1/rft/runs/{run_id}/metrics"): ("own runs", "/api/v1/rft/runs/JOB/metrics", None),
    ("GET", "/api/v1/rft/runs/{run_id}/checkpoints"): ("own runs", "/api/v1/rft/runs/JOB/checkpoints", None),
    ("GET", "/api/v1/rft/runs/{run_id}/checkpoints/{step}"): ("secret", "", None),
    ("GET", "/api/v1/compute/machines"): ("training read", "", None),
    ("POST", "/api/v1/compute/join"): ("secret", "", {}),
    ("POST", "/api/v1/compute/beat"): ("a machine's secret", "", {"version": "1"}),
    ("POST", "/api/v1/compute/back"): ("a machine's secret", "", {}),
    ("POST", "/api/v1/compute/leave"): ("a machine's secret", "", {}),
    ("GET", "/api/v1/compute/leases/{lease_id}/files/{path:path}"): (
        "a machine's secret", "/api/v1/compute/leases/none/files/log", None,
    ),
    ("GET", "/api/v1/compute/leases/{lease_id}/inputs/{path:path}"): (
        "a machine's secret", "/api/v1/compute/leases/none/inputs/x", None,
    ),
    ("PUT", "/api/v1/compute/leases/{lease_id}/files/{path:path}"): (
        "a machine's secret", "/api/v1/compute/leases/none/files/log?offset=0&size=0", None,
    ),
    ("POST", "/api/v1/compute/leases/{lease_id}/end"): (
        "a machine's secret", "/api/v1/compute/leases/none/end", {"code": 0},
    ),
    ("POST", "/api/v1/compute/leases/{lease_id}/back"): ("a machine's secret", "/api/v1/compute/leases/none/back", {}),
    ("GET", "/machines"): ("training page", "", None),
    ("POST", "/machines"): ("admin's session", "", {"action": "invite", "name": "x"}),
    ("GET", "/v1/models"): ("evals write", "", None),
    # For whom there is one: tests/hub/journeys/test_openai_client.py.
    ("GET", "/v1/models/{name}"): ("secret", "", None),
    ("POST", "/v1/chat/completions"): ("evals write", "", {"model": "no-such"}),
    ("POST", "/v1/completions"): ("evals write", "", {"model": "no-such"}),
    ("GET", "/chat"): ("evals write", "", None),
    ("POST", "/chat"): ("secret", "", {"text": ""}),
    ("GET", "/docs"): ("open", "", None),
    ("GET", "/settings"): ("admin's session", "", None),
    ("GET", "/sandboxes"): ("sandboxes page", "", None),
    ("POST", "/sandboxes"): ("secret", "", {"action": "end", "id": "none"}),
    ("GET", "/api/v1/usage"): ("training read", "", None),
    ("GET", "/usage"): ("training page", "", None),
    ("POST", "/usage"): ("admin's session", "", {"action": "quota", "name": "robots", "figure": "5"}),
    ("GET", "/training"): ("training page", "", None),
    ("POST", "/training"): ("session", "", {"toml": ""}),
    ("GET", "/training/{run_id}"): ("own runs", "/training/JOB", None),
    ("POST", "/training/{run_id}"): ("own runs' session", "/training/JOB", {"action": "stop"}),
    ("GET", "/dashboard/training/{run_id}"): ("open", "/dashboard/training/JOB", None),
    # Without a base model there is none of these; tests/hub/training_service/test_proxy.py has them with one.
    ("GET", "/train/{name}/api/v1/{path:path}"): ("secret", "", None),
    ("POST", "/train/{name}/api/v1/{path:path}"): ("secret", "", None),
    ("PUT", "/train/{name}/api/v1/{path:path}"): ("secret", "", None),
    ("DELETE", "/train/{name}/api/v1/{path:path}"): ("secret", "", None),
    ("GET", "/simple/"): ("public read", "", None),
    ("GET", "/owners/{owner}/simple/"): ("public read", "/owners/robots/simple/", None),
    ("GET", "/simple/{project}/"): ("read", "/simple/my-task/", None),
    ("GET", "/owners/{owner}/simple/{project}/"): ("read", "/owners/robots/simple/my-task/", None),
    ("GET", "/packages/{owner}/{name}/{version}/{filename}"): (
        "read", "/packages/robots/my-task/0.1.0/source.tar.gz", None,
    ),
    ("PUT", "/api/v1/uploads/{secret}"): ("secret", "/api/v1/uploads/none", None),
    ("GET", "/signin"): ("open", "", None),
    ("POST", "/signin"): ("secret", "", {"username": "ann", "password": "wrong"}),
    # Without a provider of identities there are none of these; tests/hub/journeys/test_oidc.py has them with one.
    ("GET", "/signin/oidc"): ("secret", "", None),
    ("GET", "/signin/oidc/back"): ("secret", "", None),
    ("POST", "/account/identities"): ("secret", "", {}),
    ("POST", "/account/identities/remove"): ("session", "", {"issuer": "x", "subject": "y"}),
    ("POST", "/signout"): ("session", "", {}),
    ("GET", "/join/{secret}"): ("secret", "/join/none", None),
    ("POST", "/join/{secret}"): ("secret", "/join/none", {}),
    ("GET", "/account"): ("anybody signed in", "", None),
    ("POST", "/account/tokens"): ("session", "", {"name": "t", "scopes": "evals:read"}),
    ("POST", "/account/tokens/{token_id}/revoke"): ("secret", "/account/tokens/none/revoke", {}),
    ("POST", "/account/password"): ("session", "", {"password": "wrong", "new": "another password"}),
    ("GET", "/dashboard/tokens/challenge"): ("anybody signed in", "?code=x", None),
    ("POST", "/dashboard/tokens/challenge"): ("session", "", {"code": "x"}),
    ("GET", "/teams"): ("anybody signed in", "", None),
    ("POST", "/teams"): ("session", "", {"slug": "a-new-team"}),
    ("GET", "/teams/{slug}"): ("member's session", "/teams/robots", None),
    ("POST", "/teams/{slug}/members"): ("team admin's session", "/teams/robots/members", {"username": "kim", "role": "MEMBER"}),
    ("POST", "/teams/{slug}/invite"): ("team admin's session", "/teams/robots/invite", {}),
    ("GET", "/people"): ("admin's session", "", None),
    ("POST", "/people/invite"): ("admin's session", "", {}),
    ("POST", "/people/{person_id}"): ("admin's session", "/people/EVE", {"action": "enable"}),
    ("GET", "/audit"): ("admin's session", "", None),
    ("GET", "/environments"): ("open", "", None),
    ("GET", "/environments/{owner}/{name}/difference"): (
        "page", "/environments/robots/my-task/difference?before=latest", None,
    ),
    ("GET", "/environments/{owner}/{name}"): ("page", "/environments/robots/my-task", None),
    ("POST", "/environments/{owner}/{name}"): (
        "govern's session", "/environments/robots/my-task", {"action": "visibility", "visibility": "PRIVATE"},
    ),
    ("GET", "/dashboard/environments/{owner}/{name}"): ("open", "/dashboard/environments/robots/my-task", None),
}  # fmt: skip

SESSIONS = {"eve's session", "kim's session", "bob's session", "ann's session"}
TOKENS = {f"bob's {scope}" for scope in SCOPES}
EVERYBODY = {"nobody", *SESSIONS, *TOKENS}
NIGHTLY = {f"bob's {scope}" for scope in ("account:write", "evals:write", "sandboxes:read", "training:read")}
"""Each time all people, and a token of each area."""


def tokens(area: str, *rights: str) -> set[str]:
    return {f"bob's {area}:{right}" for right in rights}


READ = tokens("environments", "read", "write")
MEMBERS = {"kim's session", "bob's session"}
MAY: dict[str, set[str]] = {
    "open": EVERYBODY,
    "anybody signed in": SESSIONS | TOKENS,
    "account read": SESSIONS | tokens("account", "read", "write"),
    "account write": SESSIONS | tokens("account", "write"),
    "members": MEMBERS | tokens("account", "read", "write"),
    "team admin": {"bob's session"} | tokens("account", "write"),
    "public read": {"nobody", *SESSIONS} | READ,
    "read": {*MEMBERS, "ann's session"} | READ,
    "read and write": {*MEMBERS, "ann's session"} | tokens("environments", "write"),
    "push": MEMBERS | tokens("environments", "write"),
    "push page": MEMBERS | tokens("environments", "write"),
    "environments write": SESSIONS | tokens("environments", "write"),
    "govern": {"bob's session", "ann's session"} | tokens("environments", "write"),
    "govern's session": {"bob's session", "ann's session"},
    "page": {*MEMBERS, "ann's session"} | TOKENS,
    "session": SESSIONS,
    "member's session": MEMBERS,
    "team admin's session": {"bob's session"},
    "admin's session": {"ann's session"},
    "public evals": {"nobody", *SESSIONS} | tokens("evals", "read", "write"),
    "evals write": SESSIONS | tokens("evals", "write"),
    "own evals": {*MEMBERS, "ann's session"} | tokens("evals", "read", "write"),
    "own evals write": {*MEMBERS, "ann's session"} | tokens("evals", "write"),
    "own evals' session": {*MEMBERS, "ann's session"},
    "training read": SESSIONS | tokens("training", "read", "write"),
    "training write": SESSIONS | tokens("training", "write"),
    "training page": SESSIONS | tokens("training", "read", "write"),
    "sandboxes page": SESSIONS | tokens("sandboxes", "read", "write"),
    "own runs": {*MEMBERS, "ann's session"} | tokens("training", "read", "write"),
    "own runs write": {*MEMBERS, "ann's session"} | tokens("training", "write"),
    "own runs' session": {*MEMBERS, "ann's session"},
    "a machine's secret": set(),  # nobody's: see `machines/test_leases.py` for what a machine may do
    "secret": set(),
}


@pytest.fixture
def hub(tmp_path):
    made = HubWriter(tmp_path)
    made.person("ann", is_admin=True)
    for slug in ("bob", "kim", "eve"):
        made.person(slug)
    made.team("robots", "bob", "kim")
    yield made
    made.close()


def routes_of(hub):
    """The routes that a Hub with accounts adds; the pages of runs are in `tests/journeys/test_doors.py`."""
    for route in hub.app.routes:
        inner = getattr(getattr(route, "original_router", None), "routes", [route])
        for each in inner:
            name = getattr(getattr(each, "endpoint", None), "__module__", "")
            if isinstance(each, APIRoute) and name.startswith("mettle.hub.routes."):
                yield from ((method, each.path) for method in each.methods)


def test_every_route_is_in_the_table(hub):
    assert set(routes_of(hub)) == set(ROUTES)


@pytest.mark.parametrize(
    "who", [pytest.param(who, marks=pytest.mark.nightly if who in NIGHTLY else ()) for who in sorted(EVERYBODY)]
)
def test_who_may_do_what(hub, who):
    places = prepared(hub)
    client = caller(hub, who)
    # What deletes or renames stands last.
    for (method, path), (kind, asked, body) in sorted(ROUTES.items(), key=lambda row: rank(*row[0])):
        if kind == "secret":
            continue
        target = asked if asked.startswith("/") else path + asked
        for name, value in places.items():
            target = target.replace(name, value)
            body = {k: v.replace(name, value) if isinstance(v, str) else v for k, v in body.items()} if body else body
        answer = send(client, method, target, body)
        said = f"{who}: {method} {target} -> {answer.status_code} {answer.text[:200]}"
        to_sign_in = answer.status_code == 303 and answer.headers["location"].startswith("/signin")
        if who in MAY[kind]:
            assert answer.status_code not in REFUSED, said
            assert not to_sign_in, said
            assert answer.status_code < 500, said
        else:
            assert answer.status_code in REFUSED or to_sign_in, said


def prepared(hub):
    bob = hub.with_token("bob")
    for version in ("0.1.0", "0.1.1"):
        assert push(bob, version=version, owner_slug="robots").status_code == 200
    found = bob.get(f"{ENV}/@0.1.0").json()["data"]
    release = bob.get(f"{ENV}/@0.1.0/inspect").json()["data"]["version_id"]
    people = {
        name.upper(): hub.with_token(name).get("/api/v1/user/whoami").json()["data"]["id"] for name in ("ann", "eve")
    }
    team = bob.get("/api/v1/user/teams").json()["data"][0]["teamId"]
    told = {"name": "x", "environment": "words", "team_id": team}
    result = bob.post("/api/v1/evaluations/", json=told).json()["id"]
    bob.post(f"/api/v1/evaluations/{result}/samples", json={"samples": [{"example_id": 0, "reward": 1.0}]})
    job = bob.post("/api/v1/rft/runs", json={**RUN, "team_id": team}).json()["run"]["id"]
    made = bob.post(f"/api/v1/environmentshub/{found['id']}/secrets", json={"name": "A_KEY", "value": "sealed"})
    asked = {"environment": "reverse-text", "inference_model": "m", "eval_config": {"api_base_url": "http://x.test/v1"}}
    hosted = bob.post("/api/v1/hosted-evaluations", json={**asked, "team_id": team}).json()["evaluation_id"]
    return {
        "HOSTED": hosted,
        "JOB": job,
        "SECRET": made.json()["data"]["id"],
        "RESULT": result,
        "ENVIRONMENT": found["id"],
        "RELEASE": release,
        "TEAM": team,
        **people,
    }


def caller(hub, who):
    if who == "nobody":
        return hub.anonymous()
    name, what = who.split("'s ")
    return hub.signed_in(name) if what == "session" else hub.with_token(name, what)


def send(client, method, target, body):
    if target.startswith("/api/") or method == "GET":
        return client.request(method, target, json=body, follow_redirects=False)
    return client.form(target, **(body or {}))


def rank(method, path):
    ends = path in ("/signout", "/account/password", "/api/v1/user/slug")
    is_late = method == "DELETE" or (path.endswith("/finalize") and "evaluations" in path)
    return (ends, method == "DELETE", is_late or path.endswith("/samples"), -path.count("/"), method, path)


def test_a_page_elsewhere_is_let_nowhere(hub):
    bob = hub.signed_in("bob")
    for method, path in ROUTES:
        answer = bob.request(method, path, headers={"Origin": "https://evil.test"}, follow_redirects=False)
        assert answer.status_code == 403, (method, path)
