"""What a Hub with accounts keeps: its database, its blobs, and how it checks who asks.

Parts: `Lab`, `open_lab`. Everything is under one folder, which only its user can read:

    hub/hub.db       people, environments, evaluations, runs (elsewhere with `database`)
    hub/secrets.key  opens the secrets that the database has sealed
    hub/training-service/  what the training service of each base model keeps
    hub/blobs/       wheels and source archives, by their SHA-256 (in an object store with `blobs`: those used here)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mettle.errors import StorageError, UserError
from mettle.hub.accounts.passwords import Passwords
from mettle.hub.accounts.people import num_admins
from mettle.hub.accounts.sessions import make_link
from mettle.hub.database import HubDatabase
from mettle.hub.limits import RateLimit
from mettle.hub.oidc.provider import OidcProvider
from mettle.hub.registry.releases import blobs_in_use
from mettle.hub.secrets.vault import Vault
from mettle.hub.training_service.offers import ServiceOffer
from mettle.storage.blobs import BlobStore
from mettle.storage.object_blobs import blob_store


@dataclass(slots=True)
class HubLimits:
    """How often one address, or one name, may try."""

    sign_in_by_address: RateLimit = field(default_factory=lambda: RateLimit(20, 20))
    sign_in_by_name: RateLimit = field(default_factory=lambda: RateLimit(10, 5))
    challenges: RateLimit = field(default_factory=lambda: RateLimit(20, 20))
    writes: RateLimit = field(default_factory=lambda: RateLimit(600, 600))


@dataclass(slots=True)
class Lab:
    """The state behind the routes that know people."""

    folder: Path
    database: HubDatabase
    blobs: BlobStore
    passwords: Passwords = field(default_factory=Passwords)
    limits: HubLimits = field(default_factory=HubLimits)
    models: Path = Path("models")
    """Folder of the model directories that hosted runs can start from."""
    upstream_index: str = ""
    """Where a package index sends pip for names that nobody has here; empty: nowhere."""
    check_reach: tuple[str, ...] = ()
    """What the machines reach in which pushes are checked, as host:port."""
    lease_s: float = 30.0
    """How long a joined machine may be silent before its work is given to another."""
    train_offers: tuple[ServiceOffer, ...] = ()
    """The base models that programs of the `tinker` SDK may train on."""
    are_runs_open: bool = True
    """Whether the runs of this machine are shown to whoever reaches the server, without an account."""
    provider: OidcProvider | None = None
    """Through whom people sign in beside their passwords."""

    @property
    def vault(self) -> Vault:
        """What seals the secrets of this Hub."""
        return Vault(self.folder)

    def first_link(self) -> str | None:
        """A fresh secret of the link that makes the first admin; None where there is one."""
        with self.database.write() as c:
            return None if num_admins(c) else make_link(c, "admin")

    def close(self) -> None:
        """Let go of the database, and of the provider."""
        if self.provider is not None:
            self.provider.close()
        self.database.close()


def existing_lab(folder: Path, *, database: str = "", blobs: str = "") -> Lab:
    """A Hub that is there, as it is: nothing is migrated or swept. Raises: UserError where there is none."""
    if not database and not (folder / "hub.db").is_file():
        raise UserError(f"there is no Hub in {folder}; --data names its folder")
    opened = HubDatabase(database) if database else HubDatabase.in_folder(folder)
    return Lab(folder.resolve(), opened, blob_store(blobs, folder.resolve() / "blobs"))


def open_lab(
    folder: Path,
    *,
    database: str = "",
    blobs: str = "",
    are_runs_open: bool = True,
    upstream_index: str = "",
    models: Path = Path("models"),
    check_reach: tuple[str, ...] = (),
    lease_s: float = 30.0,
    train_offers: tuple[ServiceOffer, ...] = (),
    provider: OidcProvider | None = None,
) -> Lab:
    """Make the folder where it is missing, and bring the database to this release.

    Raises: StorageError when the disk or the database refuses, UserError for an address that is none.
    """
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    except OSError as error:
        raise StorageError(f"the Hub's folder {folder}: {error.strerror or error}") from error
    opened = HubDatabase(database) if database else HubDatabase.in_folder(folder)
    opened.migrate()
    lab = Lab(
        folder,
        opened,
        blob_store(blobs, folder / "blobs"),
        are_runs_open=are_runs_open,
        upstream_index=upstream_index,
        models=models,
        check_reach=check_reach,
        lease_s=lease_s,
        train_offers=train_offers,
        provider=provider,
    )
    with opened.read() as c:
        known = blobs_in_use(c)
    lab.blobs.sweep(known)  # what pushes that were cut off have left
    return lab
