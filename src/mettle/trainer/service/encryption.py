"""Exports that only their recipients can read: each file encrypted with age and named `.age`.

Parts: `read_recipients`, `encrypt_files`, `is_encrypted`. Invariant: a folder has either all of its files encrypted or
none, and none that is only the service's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mettle.errors import UserError
from mettle.extras import install_line
from mettle.storage.files import storage_errors
from mettle.storage.weights import ADAPTER_CONFIG
from mettle.trainer.tenant_files import OPTIMISER_FILE, STATE_FILE

SUFFIX: Final = ".age"
MAX_RECIPIENTS: Final = 32
INTERNAL: Final = (OPTIMISER_FILE, STATE_FILE)
"""Files of the service's own beside PEFT's."""


def read_recipients(texts: Sequence[str]) -> list[Any]:
    """age's recipients, from `age1...` or a public key of ssh; none of none.

    Raises: UserError for one that is neither, for too many, and where the package is not installed.
    """
    if not texts:
        return []
    try:
        import pyrage
    except ImportError as error:
        raise UserError(
            f"age_encryption_recipients: this server lacks the package pyrage, which `{install_line('service')}` brings"
        ) from error
    if len(texts) > MAX_RECIPIENTS:
        raise UserError(f"age_encryption_recipients: {len(texts)} are named, at most {MAX_RECIPIENTS} are taken")
    found = []
    for text in texts:
        kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
        try:
            found.append(kind.Recipient.from_str(text))
        except pyrage.RecipientError as error:
            said = f"{text[:24]!r} is no public key of age (age1...) or ssh: {error}"
            raise UserError(f"age_encryption_recipients: {said}") from error
    return found


def encrypt_files(folder: Path, recipients: Sequence[Any]) -> None:
    """Encrypt the files of an adapter in place, and remove what is only the service's."""
    import pyrage

    with storage_errors(folder, "encrypting an export in"):
        for file in sorted(folder.iterdir()):
            if file.name not in INTERNAL:
                pyrage.encrypt_file(str(file), f"{file}{SUFFIX}", list(recipients))
            file.unlink()


def is_encrypted(folder: Path) -> bool:
    """Whether nobody but its recipients can read an export."""
    return (folder / f"{ADAPTER_CONFIG}{SUFFIX}").exists()
