"""Names and secrets: what a slug may be, ids, secrets and what is stored of them.

Ids are shaped like the field's ("c" and 24 letters or digits): its clients send a team as `team_id` only then.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from typing import Final

from mettle.errors import UserError

MAX_SLUG: Final = 30
SLUG: Final = re.compile(rf"(?=.{{2,{MAX_SLUG}}}\Z)[a-z0-9](?:-?[a-z0-9])+")
_LETTERS: Final = string.ascii_lowercase + string.digits


def new_id() -> str:
    return "c" + "".join(secrets.choice(_LETTERS) for _ in range(24))


def new_secret(prefix: str = "") -> str:
    """256 random bits after a prefix that tells what it opens."""
    return prefix + secrets.token_urlsafe(32)


def digest_of(secret: str) -> str:
    """What is stored of a secret: its 256 bits need no salt."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def checked_slug(text: str) -> str:
    """A name of a person or a team. Raises: UserError when it is none."""
    if not SLUG.fullmatch(text):
        raise UserError(
            f"{text[:60]!r} cannot be a name: 2 to 30 small letters, digits and single dashes between them can"
        )
    return text
