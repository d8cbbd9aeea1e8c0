"""A person joins, makes a token, leaves and comes back, in a real browser: it sends the headers that no client of ours
does, and obeys those that we send."""

import pytest
from tests import browsing
from tests.browsing import chromium, needs_browser
from tests.hub.lab_writer import PASSWORD as OF_ANN
from tests.hub.provider_made import CLIENT, SECRET, made_provider
from tests.serving import app_on_a_thread

playwright = browsing.playwright()

PASSWORD = "nine green boats"

pytestmark = [
    pytest.mark.e2e,
    needs_browser,
]


@pytest.fixture
def browser():
    with chromium() as opened:
        yield opened


def sign_in(page, username, password):
    page.goto("/signin")
    page.get_by_label("Name").fill(username)
    page.get_by_label("Password").fill(password)
    page.get_by_role("main").get_by_role("button", name="Sign in").click()


def test_a_link_makes_an_account_which_makes_a_token_and_signs_in_again(browser, hub):
    with app_on_a_thread(hub.app) as url:
        admin = browser.new_context(base_url=url).new_page()
        sign_in(admin, "ann", OF_ANN)
        admin.goto("/people")
        admin.get_by_role("button", name="Make a link").click()
        link = admin.locator("pre").first.inner_text()

        page = browser.new_context(base_url=url).new_page()
        page.goto(link)
        page.locator("[name=username]").fill("zoe")
        page.locator("[name=password]").fill(PASSWORD)
        page.locator("[name=again]").fill(PASSWORD)
        page.locator("main form button").click()
        playwright.expect(page.get_by_role("heading", level=1)).to_have_text("zoe")
        page.get_by_label("What is it for?").fill("a notebook")
        page.get_by_role("button", name="Make the token").click()
        secret = page.locator("[role=status] pre").inner_text()
        page.get_by_role("button", name="Sign out").click()
        sign_in(page, "zoe", PASSWORD)
        page.goto("/account")
        playwright.expect(page.get_by_role("cell", name="a notebook", exact=True)).to_be_visible()
        assert secret not in page.content()

        page.goto(link)
        assert page.locator("[name=again]").count() == 0, "the link makes one account"


def test_a_provider_signs_somebody_in_and_is_added_to_an_account(browser, hub):
    """The browser obeys our content security policy on its way there and back."""
    from mettle.hub.oidc.config import OidcConfig
    from mettle.hub.oidc.provider import OidcProvider

    told = {"client_id": CLIENT, "client_secret": SECRET, "name": "Example", "new_people": "everybody"}
    with made_provider() as provider, app_on_a_thread(hub.app) as url:
        hub.lab.provider = OidcProvider(OidcConfig(issuer=provider.url, **told))
        provider.redirect_url = f"{url}/signin/oidc/back"
        page = browser.new_context(base_url=url).new_page()
        page.goto("/teams")  # leads to the sign-in, and the sign-in back to it
        page.get_by_role("link", name="Continue with Example").click()
        playwright.expect(page).to_have_url(f"{url}/teams")
        page.goto("/account")
        playwright.expect(page.get_by_role("heading", level=1)).to_have_text("Dora D")

        provider.user = {"sub": "ann-there"}
        admin = browser.new_context(base_url=url).new_page()
        sign_in(admin, "ann", OF_ANN)
        admin.goto("/account")
        admin.get_by_role("button", name="Add Example").click()
        admin.get_by_role("link", name="Continue with Example").click()
        playwright.expect(admin.get_by_role("button", name=f"Remove {provider.url}")).to_be_visible()
        again = browser.new_context(base_url=url).new_page()
        again.goto("/signin?next=/account")
        again.get_by_role("link", name="Continue with Example").click()
        playwright.expect(again.get_by_role("heading", level=1)).to_have_text("ann")
