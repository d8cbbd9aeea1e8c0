"""The image and the compose file: what they name is there. They are read and not run."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from string import Template
from urllib.parse import urlsplit

import pytest

from mettle.cli import main

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
STORE = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP"}


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def dockerfile():
    """(instruction, its words) of each line, continued ones joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def told(dockerfile, instruction):
    return [words for name, words in dockerfile if name == instruction]


@pytest.fixture
def parsed(monkeypatch, tmp_path):
    """The settings that `mettle ARGUMENTS` starts a server with."""
    kept = []
    monkeypatch.setattr("mettle.hub.server.serve_hub", lambda config, say: kept.append(config))
    monkeypatch.chdir(tmp_path)

    def of(arguments):
        assert main.run(list(arguments)) == 130, "as after Ctrl-C"
        return kept.pop()

    return of


def test_the_image_starts_a_server_that_is_reached_at_the_port_it_names(dockerfile, parsed):
    (words,), (entry,) = (list(map(json.loads, told(dockerfile, name))) for name in ("CMD", "ENTRYPOINT"))
    assert entry == ["mettle"]
    config = parsed(words)
    assert (config.host, [str(config.port)]) == ("0.0.0.0", told(dockerfile, "EXPOSE"))
    (check,) = told(dockerfile, "HEALTHCHECK")
    (address,) = re.findall(r"http://[^']+", check)
    assert urlsplit(address).port == config.port


def test_what_the_image_copies_is_sent_to_its_build_and_is_all_that_the_wheel_needs(dockerfile):
    copied = {word for line in told(dockerfile, "COPY") for word in line.split()[:-1] if not line.startswith("--")}
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {each.partition("/")[0] for each in [*wheel["include"], *wheel["force-include"]]} <= copied


def test_the_image_installs_extras_that_there_are_on_a_python_that_will_do(dockerfile):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = (line.partition("=")[2] for line in told(dockerfile, "ARG"))
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert {"hub", "postgres", "s3"} <= set(extras.split(","))
    least = tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    for line in told(dockerfile, "FROM"):
        assert tuple(map(int, re.match(r"python:(\d+)\.(\d+)-", line).groups())) >= least


def test_the_hub_of_the_compose_file_is_one_that_the_command_line_would_start(compose, parsed):
    server, database = compose["services"]["hub"], compose["services"]["database"]
    secrets = {"POSTGRES_PASSWORD": "secret", "S3_SECRET_KEY": "other"}
    config = parsed([filled(each, secrets) for each in server["command"]])
    address = urlsplit(config.database)
    told = {name: filled(value, secrets) for name, value in database["environment"].items()}
    assert (address.username, address.password) == (told["POSTGRES_USER"], told["POSTGRES_PASSWORD"])
    assert (address.hostname, address.path) == ("database", f"/{told['POSTGRES_DB']}")
    assert [each.rpartition(":")[2] for each in server["ports"]] == [str(config.port)]
    assert all(each.startswith("127.0.0.1:") for each in server["ports"]), "without TLS for this machine alone"
    assert server["environment"].keys() == STORE
    assert set(re.findall(r"AWS_[A-Z_]+", (ROOT / "docs" / "how-to" / "run-a-hub.md").read_text())) >= STORE
    store = urlsplit(server["environment"]["AWS_ENDPOINT_URL"])
    assert store.hostname in compose["services"]
    identity = json.loads(filled(compose["configs"]["identities"]["content"], secrets))["identities"][0]
    assert identity["credentials"] == [{"accessKey": server["environment"]["AWS_ACCESS_KEY_ID"], "secretKey": "other"}]
    bucket = compose["services"]["bucket"]
    assert f"--bucket {urlsplit(config.blobs).netloc}" in bucket["command"][0]
    assert bucket["environment"].items() <= server["environment"].items()


def test_names_in_the_compose_file_lead_to_what_is_there(compose, parsed):
    services = compose["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", [])) <= services.keys(), name
        volumes = [each.partition(":")[0] for each in service.get("volumes", [])]
        assert set(volumes) <= compose["volumes"].keys(), name
        assert "build" in service or re.search(r":\d", service["image"]), "an image of a version"
    build = services["hub"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    proxied = shlex.split(services["proxy"]["command"])[-1]
    assert proxied == f"hub:{parsed(['hub', 'serve']).port}"
    asked = set(re.findall(r"\$\{([A-Z0-9_]+)", (DEPLOY / "compose.yaml").read_text()))
    named = {line.partition("=")[0] for line in (DEPLOY / "example.env").read_text().splitlines() if "=" in line}
    assert asked == named
    assert ".env" in (ROOT / ".gitignore").read_text().split(), "passwords are not committed"


def filled(text, values):
    """A text as compose fills in its variables."""
    return Template(re.sub(r"\$\{([A-Z0-9_]+)[^}]*\}", r"${\1}", str(text))).substitute(values)
