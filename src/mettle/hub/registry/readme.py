"""A README as HTML that a page may hold: a stranger wrote it.

Markdown becomes HTML, and of that only what is on a list stays: no script, style, form, frame or event, no address but
http, https and mailto. The page's content security policy stands behind that.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import nh3
from markdown_it import MarkdownIt

MAX_CHARACTERS: Final = 100_000
"""Some hostile text costs 20 us a character, each time that its page is opened."""
_TAGS: Final = {
    "a", "blockquote", "br", "code", "del", "details", "em", "h2", "h3", "h4", "h5", "h6", "hr", "img", "kbd", "li",
    "ol", "p", "pre", "s", "strong", "sub", "summary", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
_ATTRIBUTES: Final = {"a": {"href", "title"}, "img": {"src", "alt", "title"}, "ol": {"start"}, "th": {"align"}}


@cache
def _markdown() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def render_readme(text: str) -> str:
    """HTML for a page. Headings begin below that of the page."""
    made = _markdown().render(text[:MAX_CHARACTERS])
    for level in (5, 4, 3, 2, 1):
        made = made.replace(f"<h{level}>", f"<h{level + 1}>").replace(f"</h{level}>", f"</h{level + 1}>")
    made = made.replace("<th></th>", "<td></td>")  # a head that says nothing is none
    return nh3.clean(
        made, tags=_TAGS, attributes=_ATTRIBUTES, url_schemes={"http", "https", "mailto"},
        link_rel="nofollow noopener noreferrer",
    )  # fmt: skip
