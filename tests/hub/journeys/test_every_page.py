"""Every page of the Hub in a real browser: as wide as a telephone, light and dark, with nothing cut off and no finding
of axe-core. A page whose route is not in `PAGES` fails the test, so that a new one is looked at, too.

METTLE_TEST_PICTURES=FOLDER keeps a picture of each, for somebody who looks at them."""

import os
import re
from importlib import resources
from pathlib import Path

import pytest
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from tests import browsing
from tests.browsing import chromium, needs_browser
from tests.hub.archives_made import push, source
from tests.hub.conftest import write_finished
from tests.hub.journeys.test_people_in_a_browser import sign_in
from tests.hub.lab_writer import PASSWORD
from tests.serving import app_on_a_thread

playwright = browsing.playwright()
pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")

PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 800}
LONG = "a-model-of-a-very-long-name/Instruct-2507-bf16-adapter-of-step-200"
EVALS, RUNS = "/api/v1/evaluations", "/api/v1/rft/runs"

pytestmark = [
    pytest.mark.e2e,
    needs_browser,
]

PAGES = {
    "/": ["/"], "/signin": ["/signin?anonymous"], "/account": ["/account"], "/teams": ["/teams"],
    "/teams/{slug}": ["/teams/robots"], "/people": ["/people"], "/audit": ["/audit"],
    "/join/{secret}": ["/join/{link}?anonymous"], "/environments": ["/environments", "/environments?words=zzzz"],
    "/environments/{owner}/{name}": [
        "/environments/ann/my-task", "/environments/ann/my-task?tab=card", "/environments/ann/my-task?tab=versions",
        "/environments/ann/my-task?tab=files&path=README.md", "/environments/ann/my-task?tab=settings",
    ],
    "/environments/{owner}/{name}/difference": ["/environments/ann/my-task/difference"],
    "/evaluations": ["/evaluations", "/evaluations?environment=ann/my-task", "/evaluations?words=zzzz"],
    "/compare": ["/compare?e={first}&e={second}"], "/compare-runs": ["/compare-runs?r=done&r=other"],
    "/evaluations/{name}": ["/evaluations/{first}"],
    "/evaluations/{name}/rollouts": ["/evaluations/{first}/rollouts"],
    "/evaluations/{name}/rollouts/{index}": ["/evaluations/{first}/rollouts/0"],
    "/hosted-evaluations": ["/hosted-evaluations"],
    "/hosted-evaluations/{result_id:result}": ["/hosted-evaluations/{waiting}"],
    "/secrets": ["/secrets"], "/secrets/{owner}": ["/secrets/robots"], "/training": ["/training"], "/training/{run_id}": ["/training/{run}"],
    "/usage": ["/usage"], "/machines": ["/machines"], "/sandboxes": ["/sandboxes"],
    "/chat": ["/chat"], "/docs": ["/docs"], "/settings": ["/settings"],
    "/dashboard/tokens/challenge": ["/dashboard/tokens/challenge?code={code}"],
    "/runs/{name}": ["/runs/done"], "/runs/{name}/rollouts": ["/runs/done/rollouts"],
    "/runs/{name}/rollouts/{rollout_id:path}": ["{rollout}"],
    "/runs/{name}/metrics": ["/runs/done/metrics"], "/runs/{name}/config": ["/runs/done/config"],
    "/runs/{name}/logs": ["/runs/done/logs"], "/runs/{name}/logs/{log}": [],
    "/runs/{name}/evals": ["/runs/done/evals"], "/runs/{name}/evals/{eval_id}": ["/runs/done/evals/{eval}"],
    "/runs/{name}/evals/{eval_id}/rollouts": ["/runs/done/evals/{eval}/rollouts"],
    "/runs/{name}/evals/{eval_id}/rollouts/{index}": ["/runs/done/evals/{eval}/rollouts/0"],
}  # fmt: skip
"""Addresses of each route; `?anonymous` is looked at without signing in. A log's page is that of all logs."""
NO_PAGES = {
    "/runs/{name}/live.json", "/dashboard/environments/{owner}/{name}", "/dashboard/evaluations/{result_id:result}",
    "/dashboard/training/{run_id}", "/compare/file", "/signin/oidc", "/signin/oidc/back",
}  # fmt: skip
"""JSON for the overview, and what leads elsewhere."""


@pytest.fixture
def browser():
    with chromium() as opened:
        yield opened


def _public_key():
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def _evaluated(client, model, reward):
    sample = {
        "example_id": 0, "prompt": [{"role": "user", "content": "Say it"}], "answer": "x", "task": "my-task",
        "completion": [{"role": "assistant", "content": "it " * 40}], "reward": reward, "metrics": {"exact": reward},
    }  # fmt: skip
    body = {"name": f"ann/my-task {model}", "environment": "ann/my-task", "model_name": model}
    base = f"{EVALS}/{client.post(f'{EVALS}/', json=body).json()['evaluation_id']}"
    rows = [{**sample, "example_id": index // 3} for index in range(12)]
    assert client.post(f"{base}/samples", json={"samples": rows}).status_code == 200
    assert client.post(f"{base}/finalize", json={"metrics": {}}).status_code == 200
    return base.rpartition("/")[2]


def furnish(hub):
    """Something on each page; what stands in the addresses of `PAGES`."""
    ann = hub.with_token("ann")
    hub.team("robots", "ann", "bob")
    assert push(ann, visibility="PUBLIC").status_code == 200
    files = {"my_task.py": b"x = 1\n" + b"y = 2\n" * 9, "a.bin": b"\0"}
    assert push(ann, version="0.1.1", source_bytes=source(version="0.1.1", files=files)).status_code == 200
    told = {"first": _evaluated(ann, LONG, 1.0), "second": _evaluated(ann, "small", 0.0)}
    page = hub.signed_in("ann")
    assert page.form("/secrets/ann", name="OPENAI_API_KEY", value="x", action="secret").status_code == 303
    body = {"model": "tiny", "environments": [{"id": "reverse-text"}], "name": LONG.replace("/", " ")}
    run = ann.post(RUNS, json=body).json()["run"]["id"]
    (hub.lab.folder / "runs" / run / "weights" / "v3").mkdir(parents=True)
    asked = {"environment": "reverse-text", "model": "m", "api_base_url": "http://127.0.0.1:9/v1"}
    told["run"] = run
    told["waiting"] = page.form("/hosted-evaluations", **asked).headers["location"].rpartition("/")[2]
    told["link"] = page.post("/people/invite", data={"csrf": page.csrf}).text.partition("/join/")[2].partition("<")[0]
    made = hub.anonymous().post("/api/v1/auth_challenge/generate", json={"encryptionPublicKey": _public_key()})
    told["code"] = made.json()["challenge"]
    write_finished(hub.lab.folder / "runs" / "done", steps=4, groups=2)
    write_finished(hub.lab.folder / "runs" / "other", steps=3, groups=2, seed=7)
    rollouts = page.get("/runs/done/rollouts").text
    told["rollout"] = "/runs/done/rollouts/" + rollouts.partition('href="/runs/done/rollouts/')[2].partition('"')[0]
    told["eval"] = page.get("/runs/done/evals").text.partition("/runs/done/evals/")[2].partition('"')[0]
    return told


def faults_of(page, address):
    """What is wrong with a page: its status, what is wider than the window, what axe finds."""
    answer = page.goto(address)
    faults = [] if answer.status == 200 else [f"answers {answer.status}"]
    wider = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    faults += [f"is {wider} pixels too wide"] if wider > 0 else []
    # Not as a script of the page: its content-security policy refuses what it does not serve itself.
    page.evaluate(AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']}).then(r => r.violations)")
    return faults + [f"{each['id']}: {each['nodes'][0]['html'][:160]}" for each in found]


def keep_picture(page, look_name, address):
    if folder := os.environ.get("METTLE_TEST_PICTURES"):
        name = re.sub(r"[^a-z0-9]+", "-", address.lower()).strip("-")[:80] or "home"
        page.screenshot(path=Path(folder) / look_name / f"{name}.png", full_page=True)


def look(browser, url, addresses, *, scheme, viewport):
    """Faults of each page that has some."""
    known = browser.new_context(base_url=url, color_scheme=scheme, viewport=viewport)
    stranger = browser.new_context(base_url=url, color_scheme=scheme, viewport=viewport)
    try:
        pages = {False: known.new_page(), True: stranger.new_page()}
        sign_in(pages[False], "ann", PASSWORD)
        found = {}
        for address in addresses:
            page = pages["anonymous" in address]
            found[address] = faults_of(page, address.replace("?anonymous", ""))
            keep_picture(page, f"{scheme}-{viewport['width']}", address)
    finally:
        known.close()
        stranger.close()
    return {address: faults for address, faults in found.items() if faults}


AXE = (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


def test_the_page_of_an_environment_fits_a_telephone_in_the_dark(browser, hub):
    assert push(hub.with_token("ann"), visibility="PUBLIC").status_code == 200
    with app_on_a_thread(hub.app) as url:
        assert look(browser, url, ["/environments/ann/my-task"], scheme="dark", viewport=PHONE) == {}


def test_each_route_of_a_page_has_an_address_to_look_at(hub):
    routes = [
        each
        for route in hub.app.routes
        for each in getattr(getattr(route, "original_router", None), "routes", [route])
        if isinstance(each, APIRoute) and "GET" in each.methods and not each.include_in_schema
    ]
    pages = {each.path for each in routes if each.response_class is HTMLResponse or "{" in each.path}
    pages = {path for path in pages if not path.startswith(("/api/", "/train/", "/simple", "/owners", "/packages"))}
    assert pages - NO_PAGES == set(PAGES)


@pytest.mark.nightly
@pytest.mark.parametrize(("scheme", "viewport"), [("light", PHONE), ("dark", PHONE), ("light", DESK), ("dark", DESK)])
def test_every_page_fits_and_can_be_read_by_everybody(browser, hub, scheme, viewport):
    told = furnish(hub)
    addresses = [each.format(**told) for group in PAGES.values() for each in group]
    with app_on_a_thread(hub.app) as url:
        assert look(browser, url, addresses, scheme=scheme, viewport=viewport) == {}
