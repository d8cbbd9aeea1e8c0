"""`mettle inference`: serve a model over the OpenAI API, or talk to one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mettle.cli.groups import NounGroup
from mettle.cli.options import ConfigCommand, dry_run_option, one_word, print_config, split_words
from mettle.cli.terminal import going_on, print_json, print_next
from mettle.errors import ServiceError, UserError
from mettle.wording import printable

if TYPE_CHECKING:
    from mettle.config.options import Given


@click.group(cls=NounGroup)
def inference() -> None:
    """Serve a model, or talk to one."""


@inference.command(cls=ConfigCommand, model="mettle.inference.config:ServeConfig", metavar="MODEL_DIR [FILE.toml]...")
@dry_run_option
def serve(words: list[str], given: Given, is_dry_run: bool) -> None:
    """Serve a model directory over the OpenAI API until Ctrl-C."""
    from mettle.cli.local_server import local_server
    from mettle.config import load_config
    from mettle.inference.config import ServeConfig
    from mettle.web.doors import is_loopback
    from mettle.web.keys import API_KEY_ENV, Keys

    files, names = split_words(words)
    model = one_word(names, "MODEL_DIR")
    loaded = load_config(ServeConfig, files, given.with_value("model", model, "command line"))
    if is_dry_run:
        print_config(loaded, is_json=False)
        return
    settings = loaded.config.model_dump(mode="json", exclude={"model", "api_key"})
    given_key = loaded.config.api_key
    keys = Keys.from_environment()
    keys = replace(keys, api=given_key.get_secret_value()) if given_key is not None else keys
    if not keys.api and not is_loopback(loaded.config.host):
        click.echo(f"whoever reaches {loaded.config.host} may use the model; --api-key asks for a key", err=True)
    with (
        going_on(f"`mettle inference serve {model}` starts it again"),
        local_server(Path(model), keys, **settings) as server,
    ):
        click.echo(f"serving {loaded.config.served_model_name} at {server.base_url} until Ctrl-C")
        print_next(f"mettle inference chat -b {server.base_url}" + (f" -k {API_KEY_ENV}" if keys.api else ""))
        code = server.process.wait()
        raise ServiceError(f"the inference server ended with exit code {code}")


@inference.command()
@click.argument("model_dir", type=click.Path(path_type=Path), required=False, metavar="[MODEL_DIR]")
@click.option(
    "-b",
    "--api-base-url",
    "--base-url",
    "base_url",
    help="Talk to this OpenAI-compatible endpoint instead of a model directory.",
)
@click.option("-m", "--model", help="The model's name at the endpoint; the first it lists by default.")
@click.option("-k", "--api-key-var", help="Environment variable that holds the endpoint's key.")
@click.option("-q", "--prompt", help="Ask this once and print the answer.")
@click.option("-s", "--system", help="System message.")
@click.option("-t", "--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@click.option("-T", "--temperature", type=click.FloatRange(min=0.0), help="0 always takes the likeliest token.")
@click.option("--json", "is_json", is_flag=True, help="With -q: print the question and the answer as JSON.")
def chat(
    model_dir: Path | None,
    base_url: str | None,
    model: str | None,
    api_key_var: str | None,
    prompt: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    is_json: bool,
) -> None:
    """Talk to a model. A directory, a run, or any OpenAI-compatible endpoint."""
    from mettle.cli.chat import Conversation, converse, first_model, key_from
    from mettle.cli.local_server import local_server

    if (model_dir is None) == (base_url is None):
        raise UserError(
            "name a model directory or an endpoint: `mettle inference chat DIR` or `-b http://HOST:PORT/v1`"
        )
    if is_json and prompt is None:
        raise UserError("--json goes with -q: a conversation is for people")
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    with ExitStack() as stack:
        stack.enter_context(going_on("nothing is kept of a conversation"))
        if model_dir is not None:
            server = stack.enter_context(local_server(model_dir))
            base_url, model = server.base_url, server.model
        assert base_url is not None, "one of the two was given"
        key = key_from(api_key_var)
        conversation = Conversation(
            base_url,
            model or first_model(base_url, key),
            {name: value for name, value in sampling.items() if value is not None},
            key,
            [{"role": "system", "content": system}] if system else [],
        )
        if prompt is None:
            converse(conversation)
        elif is_json:
            answer = "".join(conversation.ask(prompt))
            print_json({"model": conversation.model, "prompt": prompt, "answer": answer})
        else:
            for piece in conversation.ask(prompt):
                click.echo(printable(piece), nl=False)
            click.echo()
