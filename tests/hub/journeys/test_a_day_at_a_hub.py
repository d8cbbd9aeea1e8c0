"""A person at a Hub that really works, in a real browser: signs up, pushes, reads the page, evaluates, opens a sample,
trains, watches it live, stops it, downloads the adapter, talks to it, and sets it beside the model that it began with.

The server is a process of its own with its workers; the run trains an adapter; the endpoint is one of the test's own."""

from __future__ import annotations

import re
import tarfile

import httpx
import pytest
from tests import browsing
from tests.browsing import WAIT_MS, chromium, needs_browser
from tests.hub.archives_made import push
from tests.hub.journeys.test_people_in_a_browser import PASSWORD
from tests.hub.machines.journeys.test_two_machines import HeldModel, handler_of, started, until
from tests.serving import handler_on_a_thread

playwright = browsing.playwright()
pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    needs_browser,
]
TOML = """name = "the first"
model = "tiny"
max_steps = 400
batch_size = 32
rollouts_per_example = 8
lora_rank = 8
max_tokens = 8

[[env]]
id = "reverse-text"
"""


@pytest.fixture
def serving(tmp_path):
    """The address of a Hub, and the link of its first admin."""
    words = ["hub", "serve", "--port", "0", "--no-check-pushes", "--no-sandboxes"]
    with started(words, tmp_path):
        log = tmp_path / f"{words[1]}-{words[-1]}.log"
        link = until(lambda: re.search(r"http://\S+/join/\S+", log.read_text()), "the link of the first admin")[0]
        yield link.partition("/join/")[0], link


@pytest.fixture
def page(serving):
    complaints: list[str] = []
    with chromium() as browser:
        opened = browser.new_context(base_url=serving[0], accept_downloads=True).new_page()
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        yield opened
    assert complaints == []


def sign_up(page, link):
    page.goto(link)
    page.locator("[name=username]").fill("zoe")
    page.locator("[name=password]").fill(PASSWORD)
    page.locator("[name=again]").fill(PASSWORD)
    page.locator("main form button").click()
    playwright.expect(page.get_by_role("heading", level=1)).to_have_text("zoe")


def make_token(page):
    page.get_by_label("What is it for?").fill("pushes")
    for box in page.locator("main input[name=scopes]").all():
        box.check()
    page.get_by_role("button", name="Make the token").click()
    return page.locator("[role=status] pre").inner_text()


def evaluate(page, model, endpoint=""):
    """Fill in the form and wait until the results are there; their address."""
    page.goto("/hosted-evaluations")
    told = {"environment": "reverse-text", "model": model, "api_base_url": endpoint}
    for name, value in {**told, "num_examples": "4", "rollouts": "1"}.items():
        page.locator(f"main [name={name}]").fill(value)
    page.get_by_role("button", name="Queue it").click()
    page.wait_for_url("**/evaluations/c*")
    page.get_by_role("link", name="Rollouts").first.wait_for()
    return page.url


def test_a_person_takes_a_model_from_an_environment_to_an_answer(page, serving):
    url, link = serving
    sign_up(page, link)
    client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {make_token(page)}"}, timeout=60)
    assert push(client, visibility="PUBLIC").status_code == 200
    page.get_by_role("link", name="Environments").click()
    page.get_by_role("link", name="my-task").first.click()
    playwright.expect(page.get_by_role("heading", name="My task")).to_be_visible()

    model = HeldModel()
    model.gate.set()
    with handler_on_a_thread(handler_of(model)) as endpoint:
        first = evaluate(page, "gpt", f"{endpoint}/v1")
    page.get_by_role("link", name="Rollouts").first.click()
    page.locator("table.rollouts tbody a, table tbody a").first.click()
    playwright.expect(page.locator(".role-assistant pre").first).to_contain_text("abc")

    page.goto("/training")
    page.get_by_label("Config, in TOML").fill(TOML)
    page.get_by_role("button", name="Queue it").click()
    page.get_by_role("link", name="the first").click()
    playwright.expect(page.locator(".progress b")).to_have_text(re.compile(r"Step ([2-9]|\d\d)"), timeout=WAIT_MS)
    playwright.expect(page.locator("[data-chart=reward] canvas")).to_be_visible()
    watched = page.url

    page.goto("/training")
    page.get_by_role("button", name="Stop the first").click()
    page.get_by_role("button", name="Go on with the first").wait_for()
    page.get_by_role("link", name="versions").click()
    row = page.get_by_role("row").nth(1)
    with page.expect_download() as downloaded:
        row.get_by_role("link", name="Download").click()
    with tarfile.open(downloaded.value.path()) as archive:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(archive.getnames())

    row.get_by_role("link", name="Chat").click()
    page.get_by_label("Say").fill("abcd")
    page.get_by_role("button", name="Send").click()
    playwright.expect(page.locator("article.role-assistant pre")).not_to_be_empty(timeout=WAIT_MS)
    said = page.locator("select[name=model]").input_value()
    assert said.partition(":")[0] == watched.rpartition("/")[2]

    second = evaluate(page, said)
    page.goto("/evaluations")
    for address in (first, second):
        page.locator(f"input[name=e][value='{address.rpartition('/')[2]}']").check()
    page.get_by_role("button", name="Compare the chosen").first.click()
    playwright.expect(page.get_by_role("heading", name="Differences")).to_be_visible()
    assert page.get_by_role("region", name="Evaluations").locator("tbody tr").count() == 2
    page.goto("/usage")
    playwright.expect(page.get_by_role("cell", name="answers")).to_be_visible()
