"""`mettle train`: a training service on your own machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mettle.cli.groups import NounGroup
from mettle.cli.options import ConfigCommand, dry_run_option, only_files, print_config
from mettle.cli.terminal import going_on
from mettle.errors import UserError

if TYPE_CHECKING:
    from mettle.config.options import Given


@click.group(cls=NounGroup)
def train() -> None:
    """Serve a base model to programs that train adapters on it."""


@train.command(cls=ConfigCommand, model="mettle.trainer.service.config:TrainServeConfig", metavar="[FILE.toml]...")
@dry_run_option
def serve(words: list[str], given: Given, is_dry_run: bool) -> None:
    """Serve a base model to programs that train adapters on it, until Ctrl-C."""
    import asyncio
    import os

    from mettle.config import load_config
    from mettle.extras import install_line
    from mettle.log import setup_logging
    from mettle.trainer.service.config import TrainServeConfig, missing_packages

    loaded = load_config(TrainServeConfig, only_files(words), given)
    if is_dry_run:
        print_config(loaded, is_json=False)
        return
    config = loaded.config
    missing = missing_packages()
    if missing:
        raise UserError(f"{', '.join(missing)} is not installed here; `{install_line('service')}` brings it")
    if not (config.base_model / "config.json").exists():
        raise UserError(f"no model in {config.base_model}: it has no config.json; give a Hugging Face model directory")
    setup_logging(level=config.log_level)
    # Before torch is imported: its thread pools read it once.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.num_threads))
    from mettle.trainer.service.server import serve as serve_training

    def tell(address: str) -> None:
        click.echo(f"serving {config.model_name} for training at {address} until Ctrl-C")
        click.echo(f"its data is in {config.data}; clients need:")
        key = "a key of " + str(config.keys) if config.keys else "tml-ANYTHING (each is a tenant of its own)"
        click.echo(f"  TINKER_BASE_URL={address} TINKER_API_KEY={key}")

    with going_on("the same command goes on where it stopped: nothing that was accepted is lost"):
        asyncio.run(serve_training(config, tell))
        raise KeyboardInterrupt  # The server ends on Ctrl-C and on SIGTERM, and says nothing then.


@train.command()
@click.argument("name")
def key(name: str) -> None:
    """Print a new line for a file of keys."""
    from mettle.trainer.service.access import new_key

    if not name.isprintable() or len(name.split()) != 1 or "#" in name:
        raise UserError(f"a name is one word without '#', not {name!r}")
    click.echo(f"{new_key()} {name}")
