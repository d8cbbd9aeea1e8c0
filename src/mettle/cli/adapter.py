"""`mettle adapter`: the LoRA adapters that runs have trained."""

from __future__ import annotations

from pathlib import Path

import click

from mettle.cli.groups import NounGroup
from mettle.cli.terminal import check_free, find_run, json_option, print_json, print_next, print_table

RUNS = Path("runs")


@click.group(cls=NounGroup)
def adapter() -> None:
    """List, take out and merge the adapters that runs have trained."""


@adapter.command("list")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=RUNS, help="Folder of runs.  [default: runs]"
)
@json_option
def list_them(directory: Path, is_json: bool) -> None:
    """List the newest adapter of each run."""
    from mettle.runs.adapters import list_adapters

    found = list_adapters(directory)
    if is_json:
        print_json(found)
        return
    if not found:
        click.echo(f"no adapters in {directory}; `[model] lora = {{ rank = 16 }}` in a run's config trains one")
        return
    rows = [
        (row["run"], f"v{row['version']}", row["rank"], row["alpha"], f"{row['bytes'] / 1e6:.1f} MB", row["base"])
        for row in found
    ]
    print_table(("run", "version", "rank", "alpha", "size", "base"), rows)
    print_next(f"mettle adapter export {found[0]['run_dir']} FOLDER")


_version = click.option("--version", type=int, help="This one of a run's versions.  [default: the newest]")


@adapter.command()
@click.argument("source", metavar="RUN")
@click.argument("folder", type=click.Path(path_type=Path))
@_version
def export(source: str, folder: Path, version: int | None) -> None:
    """Write an adapter as a folder that peft and transformers load."""
    from mettle.runs.adapters import base_of, find_adapter
    from mettle.trainer.merging import write_adapter

    place = _place(source)
    check_free(folder)
    found = find_adapter(place, version)
    write_adapter(found, folder, base=base_of(place, found, None))
    click.echo(f"wrote {folder}")
    print_next(f"mettle adapter merge {folder} MODEL_FOLDER")


@adapter.command()
@click.argument("source", metavar="RUN|ADAPTER_FOLDER")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--base", type=click.Path(path_type=Path), help="The model directory it belongs to.  [default: known]")
@_version
def merge(source: str, folder: Path, base: Path | None, version: int | None) -> None:
    """Write a whole model directory: the base with an adapter added to its weights."""
    from mettle.runs.adapters import base_of, find_adapter
    from mettle.trainer.merging import write_merged

    place = _place(source)
    check_free(folder)
    found = find_adapter(place, version)
    write_merged(base_of(place, found, base), found, folder)
    click.echo(f"wrote {folder}")
    print_next(f'mettle inference chat {folder} -q "..."')


def _place(source: str) -> Path:
    path = Path(source)
    return path if (path / "adapter_config.json").exists() else find_run(source)
