"""Which programs of the host a language needs, and whether they are there and shown in the sandbox.

    spec = require_language(config, "c++")   the entry of that name or alias; the user's entries come first
    why_missing(spec)                        what this host lacks for it, in words, or None

Invariant: a program that the host has and the sandbox does not show is as good as missing, and the words say which.
"""

from __future__ import annotations

import glob
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Final, Protocol

from mettle.errors import UserError
from mettle.sandbox.config import LanguageSpec, is_below, is_covered
from mettle.sandbox.languages import BUILT_IN

ELSEWHERE: Final = ("docker", "kubernetes")
"""Backends whose programs are an image's; they look for them there."""
SEARCHED: Final = ("/usr/local/bin", "/usr/bin", "/bin")
_SHOWN: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib64")


class HasLanguages(Protocol):
    """What is needed of a config."""

    @property
    def languages(self) -> tuple[LanguageSpec, ...]: ...

    @property
    def backend(self) -> str: ...


def known_languages(config: HasLanguages) -> dict[str, LanguageSpec]:
    """All entries by name; a user's entry takes the place of a built-in one of that name."""
    return {spec.name: spec for spec in (*BUILT_IN, *config.languages)}


def find_language(config: HasLanguages, name: object) -> LanguageSpec:
    """The entry of this name or alias; UserError naming those that exist."""
    known = known_languages(config)
    for spec in reversed(known.values()):
        if isinstance(name, str) and name.lower() in spec.names:
            return spec
    raise UserError(
        f"the sandbox does not run {name!r}; it runs {', '.join(known)}. "
        "Another interpreter is added by an entry in sandbox.languages"
    )


def require_language(config: HasLanguages, name: object) -> LanguageSpec:
    """The same, of a language that this host really has; UserError naming what is missing."""
    spec = find_language(config, name)
    missing = None if config.backend in ELSEWHERE else why_missing(spec)
    if missing:
        raise UserError(f"{spec.name} cannot be judged on this host: {missing}")
    return spec


def shown_paths(specs: Sequence[LanguageSpec]) -> tuple[str, ...]:
    """What of the host the sandbox must show for these, besides /usr: those of the patterns that exist."""
    patterns = {os.path.expanduser(pattern) for spec in specs for pattern in spec.host_paths}
    found = {path for pattern in patterns for path in glob.glob(pattern)}
    return tuple(sorted(path for path in found if os.path.isdir(path) and not is_covered(path)))


def why_missing(spec: LanguageSpec) -> str | None:
    """What this host lacks for a language, and where it was looked for; None if nothing."""
    shown = shown_paths([spec])
    for command in (spec.compile, spec.run, spec.version):
        program = command[0] if command else ""
        if not program or "{" in program:
            continue
        found = _find_program(program, shown)
        if found is None:
            elsewhere = shutil.which(program)
            hint = f" ({elsewhere} is not shown in the sandbox; add its directory to host_paths)" if elsewhere else ""
            return f"there is no {program!r} in {', '.join([*SEARCHED, *shown])}{hint}"
        real = os.path.realpath(found)
        if not any(is_below(real, path) for path in (*_SHOWN, *shown, sys.base_prefix)):
            return f"{program!r} leads to {real}, which the sandbox does not show; add its directory to host_paths"
    return None


def _find_program(program: str, shown: Sequence[str]) -> str | None:
    if os.path.isabs(program):
        return program if os.access(program, os.X_OK) else None
    return shutil.which(program, path=":".join(SEARCHED)) or shutil.which(program, path=":".join(bins(shown)))


def bins(shown: Sequence[str]) -> list[str]:
    """Where programs lie in what is shown."""
    return [folder for path in shown for folder in (f"{path}/bin", path)]
