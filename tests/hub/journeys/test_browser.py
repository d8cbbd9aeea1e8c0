"""A journey through the pages in a real browser: nothing on the console, nothing from another host."""

import re

import pytest
from tests import browsing
from tests.browsing import chromium, needs_browser

playwright = browsing.playwright()


pytestmark = [
    pytest.mark.e2e,
    needs_browser,
]


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser, live_hub):
    """A page that fails its test when the console has errors or a request leaves the Hub."""
    base_url, _ = live_hub
    complaints: list[str] = []
    context = browser.new_context(base_url=base_url, color_scheme="light", viewport={"width": 1300, "height": 900})
    opened = context.new_page()
    opened.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda r: None if r.url.startswith((base_url, "data:")) else complaints.append(r.url))
    yield opened
    context.close()
    assert complaints == []


def test_a_run_is_followed_while_it_goes_on(page, live_hub):
    _, writer = live_hub
    page.goto("/")
    page.get_by_role("link", name="followed").click()
    playwright.expect(page.get_by_role("heading", level=1)).to_have_text("followed")
    playwright.expect(page.locator("[data-chart=reward] canvas")).to_be_visible()
    before = writer.version
    writer.train_step(before + 1)
    playwright.expect(page.locator(".progress b")).to_have_text(f"Step {before + 1}")
    page.locator("[data-chart=reward] .u-over").hover(position={"x": 5, "y": 50})
    playwright.expect(page.locator("[data-chart=reward] [data-readout]")).to_contain_text("step ")


def test_from_the_table_to_one_token(page):
    page.goto("/runs/followed/rollouts")
    page.get_by_label("Step", exact=True).fill("2")
    playwright.expect(page.get_by_text("of step 2")).to_be_visible()
    playwright.expect(page).to_have_url(re.compile("step=2"))
    page.keyboard.press("Tab")
    page.locator("body").click()
    page.keyboard.press("]")
    playwright.expect(page.get_by_text("of step 3")).to_be_visible()
    page.locator("table.rollouts tbody tr").filter(has_not_text="error").first.get_by_role("link").click()
    playwright.expect(page.locator(".t.on")).to_have_count(1)  # the page's own choice, which its script makes last
    first = page.locator(".t").first
    first.focus()
    playwright.expect(page.locator("[data-fact=id]")).to_have_text(first.get_attribute("data-id"))
    page.keyboard.press("ArrowRight")
    second = page.locator(".t").nth(1)
    playwright.expect(second).to_be_focused()
    playwright.expect(page.locator("[data-fact=p]")).to_have_text(second.get_attribute("data-p"))


def test_metrics_are_filtered(page):
    page.goto("/runs/followed/metrics")
    page.get_by_placeholder("filter").fill("kl|entropy")
    playwright.expect(page.locator("figure:visible")).to_have_count(2)
    playwright.expect(page.locator("[data-metric='entropy/mean'] canvas")).to_be_visible()


def test_the_theme_follows_the_system_until_it_is_chosen(page):
    page.goto("/runs/followed")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    playwright.expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    dark = page.evaluate(ground)
    assert light != dark
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(ground) == light
    page.reload()
    assert page.evaluate(ground) == light


def test_no_page_is_wider_than_a_telephone(page):
    page.set_viewport_size({"width": 390, "height": 800})
    for path in ("/", "/runs/followed", "/runs/followed/metrics", "/runs/followed/config", "/runs/followed/logs"):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path


def test_the_big_figures_stay_in_their_card_at_any_width(page):
    """Two figures of four digits and a negative one, the widest that there are."""
    page.goto("/runs/followed")
    page.evaluate("document.querySelectorAll('.big span').forEach(figure => { figure.textContent = '-0.888'; })")
    beyond = """[...document.querySelectorAll(".big")].map(line => {
        const card = line.closest(".card, .headline").getBoundingClientRect();
        return [...line.children].some(part => part.getBoundingClientRect().right > card.right - 8);
    })"""
    for width in (390, 800, 1200, 1300, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        found = page.evaluate(beyond)
        assert found, width
        assert not any(found), width


def test_pages_say_what_they_hold_without_scripts(browser, live_hub):
    context = browser.new_context(base_url=live_hub[0], java_script_enabled=False)
    opened = context.new_page()
    opened.goto("/runs/followed")
    playwright.expect(opened.get_by_text("Trainer and engine agree")).to_be_visible()
    opened.goto("/runs/followed/rollouts?step=2")
    opened.get_by_role("link", name="step 1").click()
    playwright.expect(opened.get_by_text("of step 1")).to_be_visible()
    context.close()


WRITTEN_ON_CHARTS = """
window.written = [];
const plain = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  window.written.push([[...document.querySelectorAll("canvas")].indexOf(this.canvas), String(text), y]);
  return plain.apply(this, arguments);
};
"""


def test_axes_have_whole_steps(page):
    page.add_init_script(WRITTEN_ON_CHARTS)
    page.goto("/runs/followed")
    playwright.expect(page.locator("canvas").first).to_be_visible()
    charts: dict[int, dict[int, list[str]]] = {}
    for chart, text, height in page.evaluate("window.written"):
        charts.setdefault(chart, {}).setdefault(round(height), []).append(text)
    assert charts
    for rows in charts.values():
        steps = rows[max(height for height, texts in rows.items() if texts[0][0].isdigit())]
        assert [step for step in steps if not step.isdigit()] == []


def test_two_marks_of_an_axis_never_read_the_same(page):
    page.goto("/runs/followed/metrics")
    assert page.evaluate("axisMarks([null, 0.25, 0.5])") == [None, "0.25", "0.5"]
    assert page.evaluate("axisMarks([2.28e-7, 2.3e-7, 2.32e-7])") == ["2.28e-7", "2.3e-7", "2.32e-7"]
    assert page.evaluate("axisMarks([12010, 12020])") == ["12.01k", "12.02k"]
