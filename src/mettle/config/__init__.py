"""Typed configuration: TOML files composed left to right, then dotted overrides, and a source for every value.

Parts: `positions` (the line of each key), `layers` (composition), `shape` (what a model says about a key path),
`overrides` (the command line's part), `options` (flags and other names of fields), `complaints` (errors as one line),
`rendering` (back to TOML), `loader` (all of it in order). Invariant: nothing here knows a particular config class, and
nothing imports torch.
"""

from mettle.config.complaints import nearest
from mettle.config.loader import Loaded, load_config
from mettle.config.rendering import render_sources, render_toml

__all__ = ["Loaded", "load_config", "nearest", "render_sources", "render_toml"]
