"""Every route of the OpenAPI document, asked for whatever its schema allows and more: nothing is answered by a 500."""

from __future__ import annotations

import json
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hub.archives_made import push
from tests.hub.postgres_made import hub_on

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (extra dev)")

SMALL, LARGE = 2, 40
TEXTS = ["\0", "\ud800", "\u202e", "x" * 3000, "-1", "9" * 40, "../..", "%00", "null", "", "bob", "robots", "my-task"]


def fill(hub):
    """An environment, an evaluation and a run; returns what these are called in addresses."""
    bob = hub.with_token("bob")
    hub.team("robots", "bob")
    assert push(bob, visibility="PUBLIC").status_code == 200
    made = bob.post("/api/v1/evaluations/", json={"name": "x", "environment": "words"}).json()["id"]
    bob.post(f"/api/v1/evaluations/{made}/samples", json={"samples": [{"example_id": 1, "reward": 1.0}]})
    bob.post(f"/api/v1/evaluations/{made}/finalize", json={})
    body = {"model": "tiny", "environments": [{"id": "reverse-text"}], "batch_size": 32}
    run = bob.post("/api/v1/rft/runs", json=body).json()["run"]["id"]
    return {"owner": "bob", "slug": "robots", "name": "my-task", "version": "latest", "result_id": made, "run_id": run}


@pytest.mark.parametrize(
    ("kind", "num"),
    [
        ("sqlite", SMALL),
        pytest.param("sqlite", LARGE, marks=pytest.mark.nightly),
        pytest.param("postgresql", LARGE, marks=[pytest.mark.nightly, pytest.mark.e2e]),
    ],
)
def test_no_request_that_a_schema_allows_is_answered_by_a_500(tmp_path, kind, num):
    with hub_on(kind, tmp_path / "hub") as hub:
        known, broken = fill(hub), {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schema = schemathesis.openapi.from_dict(hub.app.openapi())
            operations = [each.ok() for each in schema.get_all_operations()]
        assert len(operations) > 80
        client = hub.with_token("bob")
        for operation in operations:
            ask(client, operation, known, num, broken)
        assert broken == {}


def ask(client, operation, known, num, broken):
    label = f"{operation.method.upper()} {operation.path}"

    @settings(max_examples=num, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(), is_known=st.booleans(), text=st.none() | st.sampled_from(TEXTS))
    def send(case, is_known, text):
        path = operation.path
        for name, value in (case.path_parameters or {}).items():
            chosen = known.get(name.partition(":")[0], value) if is_known else text or value
            path = path.replace("{" + name + "}", _quoted(str(chosen)))
        query = {key: text if text is not None and not is_known else value for key, value in (case.query or {}).items()}
        body = {} if isinstance(case.body, schemathesis.core.NotSet) else {"content": _bytes(case.body, text)}
        headers = {"content-type": case.media_type or "application/json"}
        params = {k: v for k, v in query.items() if _sent(k) and _sent(v)}
        answer = client.request(
            operation.method.upper(), path or "/", params=params, headers=headers, follow_redirects=False, **body
        )
        if answer.status_code == 500:
            broken.setdefault(label, []).append((path, params, str(body)[:300], answer.text[:200]))

    send()


def _bytes(body, text):
    if isinstance(body, bytes):
        return body
    if isinstance(body, dict) and text is not None and body:
        first = sorted(body)[0]
        body = {**body, first: [text] if isinstance(body[first], list) else text}
    return json.dumps(body, default=str).encode()


def _quoted(text):
    from urllib.parse import quote

    return quote(text.encode("utf-8", "replace"), safe="") or "-"


def _sent(value):
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True
