"""TLS between client and service: certificates of one's own, every way they can be wrong, and where a token never goes."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from mettle.errors import UserError
from mettle.sandbox import MachineConfig, SandboxConfig, StdioTest, open_judge, open_machines
from mettle.sandbox.protocols import Machine
from mettle.sandbox.service.certificates import tls_context
from mettle.sandbox.service.client.access import NotTrusted, ServiceAccess
from mettle.sandbox.service.client.client import ServiceClient
from mettle.sandbox.service.config import ServiceConfig
from mettle.sandbox.service.faults import ServiceLost
from mettle.sandbox.service.tokens import TOKEN_ENV
from serving import make_token, serving

Certify = Callable[[str, str], tuple[Path, Path]]


def _openssl(home: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=home, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `ca.pem` and `ca.key`, made on the spot: no key is kept in this repository."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by the openssl program, which is not here")
    home = tmp_path_factory.mktemp("ca")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl(home, "req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=tests")
    return home


@pytest.fixture(scope="module")
def certify(authority: Path) -> Certify:
    """A certificate for these names, signed by the authority, and its key."""

    def make(name: str, days: str = "2") -> tuple[Path, Path]:
        stem = f"{name.replace(':', '-')}{days}"
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        _openssl(authority, "req", *curve, "-keyout", f"{stem}.key", "-out", f"{stem}.csr", "-subj", "/CN=service")
        (authority / "ext").write_text(f"subjectAltName={name}\n")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", days, "-extfile", "ext"]
        _openssl(authority, "x509", "-req", "-in", f"{stem}.csr", *signed, "-out", f"{stem}.pem")
        return authority / f"{stem}.pem", authority / f"{stem}.key"

    return make


async def _connected(machine: Machine, port: int) -> bool:
    async with asyncio.timeout(100):
        while True:
            try:
                (await machine.connect(port)).close()
            except ConnectionError:
                await asyncio.sleep(0.05)
            else:
                return True


@pytest.mark.usefixtures("_needs_isolation")
async def test_judgements_machines_and_ports_work_over_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: Path, certify: Certify
) -> None:
    cert, key = certify("IP:127.0.0.1", "2")
    monkeypatch.setenv(TOKEN_ENV, make_token(tmp_path))
    async with serving(tmp_path, tls_cert=str(cert), tls_key=str(key)) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        config = SandboxConfig(backend="remote", urls=(url,), ca_file=authority / "ca.pem")
        async with open_judge(config) as judge, open_machines(config) as machines:
            result = await judge.judge("print(int(input()) + 1)", [StdioTest(stdin="41", expected="42")])
            assert result.has_passed
            machine = await machines.create(MachineConfig(memory_mb=128, files={"a": "x" * 1_000_000}))
            assert (await machine.exec("wc -c < a")).stdout.strip() == "1000000"
            await machine.start(["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"])
            assert await _connected(machine, 8000), "through a websocket"
        with pytest.raises(NotTrusted, match="signed by nobody known here; --ca-file"):
            async with open_judge(config.model_copy(update={"ca_file": None})):
                pass
        with pytest.raises(ServiceLost, match="does it speak https:// only"):
            async with ServiceClient(url.replace("https:", "http:")) as client:
                await client.status()


@pytest.mark.usefixtures("_needs_isolation")
async def test_a_certificate_for_another_name_and_a_service_without_tls_are_each_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: Path, certify: Certify
) -> None:
    monkeypatch.setenv(TOKEN_ENV, make_token(tmp_path))
    cert, key = certify("DNS:elsewhere.example.org", "2")
    trusted = {"ca_file": authority / "ca.pem"}
    async with serving(tmp_path, tls_cert=str(cert), tls_key=str(key)) as (service, url):
        with pytest.raises(NotTrusted, match="is for another name"):
            async with ServiceClient(url, **trusted) as client:
                await client.status()
        assert b"requests_total{" not in service.metrics.page([]).body, "not even the token was sent"
    async with serving(tmp_path) as (_, url):
        with pytest.raises(NotTrusted, match="does not speak TLS; is it http://"):
            async with ServiceClient(url.replace("http:", "https:"), **trusted) as client:
                await client.status()


def test_certificates_that_cannot_be_used_are_said_at_the_start(
    tmp_path: Path, authority: Path, certify: Certify
) -> None:
    cert, key = certify("IP:127.0.0.1", "2")
    both = tmp_path / "both.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    assert tls_context(both, None)
    (tmp_path / "noise").write_text("no certificate")
    _openssl(tmp_path, "ec", "-in", str(key), "-aes256", "-passout", "pass:abcd", "-out", "locked.key")
    for given, why in (
        ((cert, authority / "ca.key"), "not that of the certificate"),
        ((cert, None), "hold the key as well"),
        ((tmp_path / "noise", key), "PEM"),
        ((tmp_path / "nothing", key), "no such file"),
        ((cert, tmp_path / "locked.key"), "has a password"),
    ):
        with pytest.raises(UserError, match=why):
            tls_context(*given)
    with pytest.raises(ValidationError, match="tls_key needs tls_cert"):
        ServiceConfig(tls_key=key)
    with pytest.raises(ValidationError, match="leave out unix"):
        ServiceConfig(tls_cert=cert, unix=tmp_path / "s")
    with pytest.raises(UserError, match="holds no certificate"):
        ServiceAccess(ca_file=tmp_path / "noise").connector("https://127.0.0.1:1")


@pytest.mark.parametrize("url", ["http://10.0.0.5:8300", "http://service.example.org:8300", "http://[fd00::1]:8300"])
def test_a_token_is_not_sent_over_plain_http_to_another_host(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, "a token that is long enough")
    with pytest.raises(UserError, match=r"is not sent to .* --plain-http"):
        ServiceClient(url)
    ServiceClient(url, plain_http=True)
    ServiceClient(url.replace("http:", "https:"))
    monkeypatch.delenv(TOKEN_ENV)
    ServiceClient(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "unix:/run/s"])
def test_on_this_host_plain_http_is_enough(url: str) -> None:
    ServiceAccess("a token that is long enough").check(url)


async def test_a_fleet_with_one_plain_address_sends_nothing_to_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, "a token that is long enough")
    config = SandboxConfig(backend="remote", urls=("http://127.0.0.1:1", "http://10.0.0.5:8300"))
    with pytest.raises(UserError, match=r"10\.0\.0\.5"):
        async with open_machines(config):
            pass


@pytest.mark.parametrize(
    ("host", "is_open"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True), ("10.0.0.5", True)]
)
def test_a_service_knows_that_others_can_listen_in(host: str, is_open: bool) -> None:
    assert ServiceConfig(host=host).is_in_the_open is is_open
    assert not ServiceConfig(host=host, tls_cert=Path("cert.pem")).is_in_the_open
