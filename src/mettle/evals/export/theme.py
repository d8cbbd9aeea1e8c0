"""How a file that is handed over looks: as the Hub's pages do.

Parts: `STYLE`, `document` (a page without script), `content_policy`. The tones are those of the Hub's stylesheet; a
test holds them to it. Fonts are the reader's own, because the file asks nobody for anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
from importlib import resources


def style() -> str:
    """The stylesheet of every file that is handed over."""
    return resources.files(__package__).joinpath("theme.css").read_text(encoding="utf-8")


def document(title: str, body: str) -> str:
    """A page of `body`, which is markup already."""
    css = style()
    policy = html.escape(f"default-src 'none'; style-src '{digest(css)}'")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{html.escape(title)}</title>\n<style>{css}</style>\n</head>\n<body>\n"
        f"{BAR}<main>\n{body}</main>\n</body>\n</html>\n"
    )


BAR = (
    '<header class="bar"><span class="mark">'
    '<svg viewBox="0 0 24 24" aria-hidden="true"><path d="M3 18.5 8.2 6l3.8 8 3.8-8L21 18.5"/></svg>'
    "Mettle</span></header>\n"
)
"""What stands at the top of every page."""


def digest(text: str) -> str:
    """A piece of script or style as a content security policy allows it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
