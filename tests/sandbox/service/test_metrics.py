"""The page for Prometheus: its form, by the rules of the text format; whose figures are on it; and that the docs name all."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from mettle.sandbox.service import metrics
from mettle.sandbox.service.tokens import TOKEN_ENV
from serving import ApiCaller, make_token, serving

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "sandbox-api.md"
OWN = "the token of whoever runs it"
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\[\\"n])*)"(?:,|$)')


class Family(NamedTuple):
    """One metric as a scraper sees it."""

    kind: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(page: str) -> dict[str, Family]:
    """The page by the rules of the text format 0.0.4; an assertion names the line that breaks one."""
    assert page.endswith("\n")
    found: dict[str, Family] = {}
    helped: set[str] = set()
    current = ""
    for line in page.splitlines():
        if line.startswith("# HELP "):
            current = line.split(" ", 3)[2]
            assert current not in helped, f"twice: {line}"
            helped.add(current)
        elif line.startswith("# TYPE "):
            name, kind = line.split(" ")[2:]
            assert name == current, f"HELP and TYPE stand together: {line}"
            found[name] = Family(kind, {})
        else:
            sample = _SAMPLE.fullmatch(line)
            assert sample, line
            labels = tuple(_LABEL.findall(sample[2] or ""))
            assert "".join(f'{name}="{value}",' for name, value in labels).rstrip(",") == (sample[2] or ""), line
            family = found[current]
            suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
            assert sample[1] in {current + suffix for suffix in suffixes}, f"not of {current}: {line}"
            assert (sample[1], labels) not in family.samples, f"twice: {line}"
            family.samples[sample[1], labels] = float(sample[3])
    return found


def check(families: dict[str, Family]) -> None:
    """What promtool would say of names, units and histograms."""
    for name, family in families.items():
        assert family.kind in ("gauge", "counter", "histogram")
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert not re.search(r"_(mb|kb|ms|minutes)(_|$)", name), f"{name} is not in base units"
        assert all(value >= 0 for value in family.samples.values())
        if family.kind == "histogram":
            assert name.endswith("_seconds")
            buckets = [
                (labels[0][1], value) for (of, labels), value in family.samples.items() if of.endswith("_bucket")
            ]
            bounds, values = [float(bound) for bound, _ in buckets], [value for _, value in buckets]
            assert bounds == sorted(set(bounds))
            assert bounds[-1] == float("inf")
            assert values == sorted(values)
            assert values[-1] == family.samples[f"{name}_count", ()]


class Scene(NamedTuple):
    """A service with two tokens and its own, after some work."""

    api: ApiCaller
    other: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory, _needs_isolation: None) -> AsyncIterator[Scene]:
    home = tmp_path_factory.mktemp("metrics")
    other = make_token(home, "other", max_machines=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_ENV, OWN)
        async with aiohttp.ClientSession() as session, serving(home) as (service, url):
            api = ApiCaller(session, url, service, home)
            machine = await api.create(memory_mb=128)
            await api.ask("POST", f"/machines/{machine}/exec", json={"command": "true"})
            await api.ask("POST", "/judge", json={"code": "print(1)", "tests": [{"expected": "2"}]})
            assert (await api.ask("POST", "/machines", json={}, token=other))[0] == 201
            assert (await api.ask("POST", "/machines", json={}, token=other))[0] == 429
            yield Scene(api, other)


async def page_of(scene: Scene, token: str) -> dict[str, Family]:
    headers = {"Authorization": f"Bearer {token}"}
    async with scene.api.session.get(f"{scene.api.url}/metrics", headers=headers) as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = read(await response.text())
    check(families)
    return families


@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_keeps_the_rules_of_the_format_and_has_every_figure(scene: Scene) -> None:
    families = await page_of(scene, OWN)
    named = [*metrics.GAUGES, *metrics.COUNTS, *metrics.TIMES]
    assert list(families) == [metrics.PREFIX + name for name in named]
    for name in ("judge", "judge_queue", "create", "exec", "request"):
        whole = f"{metrics.PREFIX}{name}_seconds"
        assert families[whole].samples[f"{whole}_count", ()] >= 1, name
    verdicts = f"{metrics.PREFIX}verdicts_total"
    assert families[verdicts].samples == {(verdicts, (("verdict", "wrong"),)): 1}
    assert all(families[metrics.PREFIX + name].samples for name in metrics.GAUGES), "no figure without a value"


@pytest.mark.asyncio(loop_scope="module")
async def test_each_token_sees_its_own_account_and_the_services_own_sees_all(scene: Scene) -> None:
    machines = f"{metrics.PREFIX}token_machines"
    refusals = f"{metrics.PREFIX}refusals_total"
    seen = await page_of(scene, scene.api.token)
    assert seen[machines].samples == {(machines, (("token", "api"),)): 1}
    assert not seen[refusals].samples
    memory = f"{metrics.PREFIX}token_memory_bytes"
    assert seen[memory].samples == {(memory, (("token", "api"),)): 128 << 20}
    whole = await page_of(scene, OWN)
    assert {labels[0][1] for _, labels in whole[machines].samples} == {"api", "env", "other"}
    assert whole[refusals].samples == {(refusals, (("cause", "quota"), ("token", "other"))): 1}
    most = f"{metrics.PREFIX}token_max_machines"
    assert whole[most].samples[most, (("token", "other"),)] == 1


def test_labels_of_any_text_stay_one_line() -> None:
    counted = metrics.ServiceMetrics()
    counted.count("errors_total", cause='a "b"\\\nc')
    families = read(bytes(counted.page([]).body).decode())
    [((_, labels), value)] = families[f"{metrics.PREFIX}errors_total"].samples.items()
    assert (labels, value) == ((("cause", 'a \\"b\\"\\\\\\nc'),), 1)


@pytest.mark.parametrize(
    "broken",
    [
        "# HELP a x\n# TYPE a gauge\nb 1\n",
        "# HELP a x\n# TYPE a gauge\na 1\na 1\n",
        '# HELP a x\n# TYPE a gauge\na{b="c"d} 1\n',
        "# HELP a x\n# TYPE a gauge\na one\n",
        "# HELP a x\n# TYPE a counter\na 1\n",
        "# HELP a_mb x\n# TYPE a_mb gauge\na_mb 1\n",
    ],
)
def test_the_rules_of_these_tests_can_be_broken(broken: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check(read(broken))


def test_the_reference_names_every_metric_with_its_type() -> None:
    text = REFERENCE.read_text()
    for kind, held in (("gauge", metrics.GAUGES), ("counter", metrics.COUNTS), ("histogram", metrics.TIMES)):
        for name in held:
            assert f"| `{metrics.PREFIX}{name}` | {kind} |" in text
