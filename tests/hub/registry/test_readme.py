"""READMEs of strangers: nothing of them runs or loads."""

from __future__ import annotations

import re

import pytest

from mettle.hub.registry.readme import render_readme

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "event": '<img src=x onerror="alert(1)">',
    "address": "[x](javascript:alert(1))",
    "address in html": '<a href="JaVaScRiPt:alert(1)">x</a>',
    "data": "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "frame": '<iframe src="https://evil.test"></iframe>',
    "form": '<form action="https://evil.test"><input name="password"></form>',
    "style": '<style>body { display: none }</style><p style="position: fixed">x</p>',
    "svg": '<svg onload="alert(1)"><use href="#x"/></svg>',
    "meta": '<meta http-equiv="refresh" content="0;url=https://evil.test">',
    "base": '<base href="https://evil.test/">',
    "mathml": "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
    "half a tag": '<a href="x" onclick=alert(1)//',
    "in code": "`<script>alert(1)</script>`",
    "id that shadows": '<p id="main" name="body">x</p>',
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_runs_or_loads(kind):
    html = render_readme(HOSTILE[kind])
    tags = " ".join(re.findall(r"<[^>]*>", html)).lower()
    assert not re.search(
        r"script|\son\w+=|style|iframe|<form|<input|<svg|<meta|<base|javascript|data:|\sid=|\sname=", tags
    ), html


def test_markdown_is_shown_and_headings_begin_below_the_pages():
    html = render_readme("# Title\n\n| a | b |\n|---|---|\n| 1 | ~~2~~ |\n\n[x](https://a.test)\n")
    assert "<h2>Title</h2>" in html
    assert "<td>1</td>" in html
    assert 'rel="nofollow noopener noreferrer"' in html


def test_a_readme_without_an_end_is_cut():
    assert len(render_readme("[" * 2_000_000)) < 200_000
