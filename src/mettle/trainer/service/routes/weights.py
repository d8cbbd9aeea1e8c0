"""Saved weights: what they are, lists of them and of training runs, their lifetime, and their files."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from mettle.errors import UserError
from mettle.trainer.service.bodies import MAX_TTL_S, MIN_TTL_S
from mettle.trainer.service.encryption import INTERNAL
from mettle.trainer.service.records import SavedWeights, TrainedModel
from mettle.trainer.service.routes.sessions import page_of
from mettle.trainer.service.service import TrainingService, service_of
from mettle.web.bodies import read_json
from mettle.web.problems import HttpError, json_response

COMPLETE = "checkpoint_complete"
_KNOWS_EXTERNAL = (0, 30)
"""The SDK from which on external weights are known."""
_RUN = "/api/v1/training_runs/{run_id}"
_ONE = _RUN + "/checkpoints/{segment}/{name}"


async def weights_info(request: Request) -> Response:
    """What a client needs to make a model that the weights fit."""
    service = service_of(request)
    owner = service.owner(request)
    saved = service.weights_at((await read_json(request)).get("tinker_path"), owner)
    assert saved.spec is not None, "weights are saved with their spec"
    return json_response(
        {
            "base_model": saved.base_model,
            "is_lora": True,
            "lora_rank": saved.spec.rank,
            "train_unembed": saved.spec.is_unembedding,
            "train_mlp": saved.spec.is_mlp,
            "train_attn": saved.spec.is_attention,
            "optimizer_config": {"type": "adamw"},
        }
    )


async def list_runs(request: Request) -> Response:
    """Their training runs, newest first."""
    service = service_of(request)
    owner = service.owner(request)
    models = service.store.models(owner)
    offset, limit = page_of(request)
    runs = [_run(service, model) for model in models[offset : offset + limit]]
    return json_response({"training_runs": runs, "cursor": _cursor(offset, limit, models)})


async def get_run(request: Request) -> Response:
    """One of them."""
    service = service_of(request)
    owner = service.owner(request)
    return json_response(_run(service, service.model_of(request.path_params["run_id"], owner)))


async def list_of_run(request: Request) -> Response:
    """The saved weights of one run."""
    service = service_of(request)
    owner = service.owner(request)
    model = service.model_of(request.path_params["run_id"], owner)
    saved = _known_kinds(request, service.store.checkpoints(owner, model.model_id))
    return json_response({"checkpoints": [_checkpoint(each) for each in saved]})


async def list_all(request: Request) -> Response:
    """All their saved weights, newest first."""
    service = service_of(request)
    saved = _known_kinds(request, service.store.checkpoints(service.owner(request)))
    offset, limit = page_of(request)
    page = [_checkpoint(each) for each in saved[offset : offset + limit]]
    return json_response({"checkpoints": page, "cursor": _cursor(offset, limit, saved)})


async def delete(request: Request) -> Response:
    """Remove saved weights. Who samples with them goes on until its engine is closed."""
    service = service_of(request)
    saved = _own(service, request)
    service.store.remove_checkpoint(saved.path)
    service.weights.remove(saved.folder)
    return Response(status_code=204)


async def publish(request: Request) -> Response:
    """Every key of this server may read them."""
    return _changed(request, is_public=True)


async def unpublish(request: Request) -> Response:
    return _changed(request, is_public=False)


async def set_ttl(request: Request) -> Response:
    """They end after so many seconds from now; null: never."""
    service = service_of(request)
    saved = _own(service, request)
    ttl = (await read_json(request)).get("ttl_seconds")
    if ttl is not None and (type(ttl) is not int or not MIN_TTL_S <= ttl <= MAX_TTL_S):
        raise UserError(f"ttl_seconds: a whole number from {MIN_TTL_S} to {MAX_TTL_S} is needed, or null")
    expires = None if ttl is None else service.store.clock() + ttl
    service.store.change_checkpoint(saved.path, expires_at=expires, is_public=saved.is_public)
    return Response(status_code=204)


async def archive(request: Request) -> Response:
    """A link to a tar of the adapter in PEFT's format, which works without a key for a while."""
    service = service_of(request)
    saved = _own(service, request, is_public_enough=True)
    url, expires = _link(service, request, saved.folder, "archive.tar")
    at = format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)
    return Response(status_code=302, headers={"Location": url, "Expires": at})


async def file_links(request: Request) -> Response:
    """A link to each file."""
    service = service_of(request)
    saved = _own(service, request, is_public_enough=True)
    links = {
        file.name: _link(service, request, saved.folder, file.name)
        for file in sorted(service.weights.path(saved.folder).iterdir())
        if file.name not in INTERNAL
    }
    expires = min(expires for _, expires in links.values())
    urls = {name: url for name, (url, _) in links.items()}
    return json_response({"urls": urls, "expires": _time(expires)})


async def download(request: Request) -> Response:
    """What a link leads to."""
    service = service_of(request)
    folder, name = request.path_params["folder"], request.path_params["name"]
    service.signer.check(f"{folder}/{name}", request.path_params["expires"], request.path_params["signature"])
    path = service.weights.path(folder)
    if not path.is_dir():
        raise HttpError(404, "these weights are not there any more")
    if name == "archive.tar":
        data = await run_in_threadpool(_tar, path)
        return Response(data, media_type="application/x-tar")
    return FileResponse(path / name)


def _tar(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in sorted(folder.iterdir()):
            if file.name not in INTERNAL:
                tar.add(file, arcname=file.name)
        tar.addfile(tarfile.TarInfo(COMPLETE))
    return buffer.getvalue()


def _link(service: TrainingService, request: Request, folder: str, name: str) -> tuple[str, float]:
    signed, expires = service.signer.signed(f"{folder}/{name}")
    return f"{service.root(request)}/api/v1/files/{signed}/{folder}/{name}", expires


def _own(service: TrainingService, request: Request, *, is_public_enough: bool = False) -> SavedWeights:
    owner = service.owner(request)
    at = request.path_params
    saved = service.weights_at(f"tinker://{at['run_id']}/{at['segment']}/{at['name']}", owner)
    if saved.owner != owner and not is_public_enough:
        raise HttpError(403, "these weights are another's: they may be read, not changed")
    return saved


def _known_kinds(request: Request, saved: list[SavedWeights]) -> list[SavedWeights]:
    """What a client can read: old ones refuse a whole list for a kind of weights that they do not know."""
    version = re.match(r"AsyncTinker/Python (\d+)\.(\d+)", request.headers.get("user-agent", ""))
    if version is None or (int(version[1]), int(version[2])) >= _KNOWS_EXTERNAL:
        return saved
    return [each for each in saved if each.kind != "external"]


def _changed(request: Request, *, is_public: bool) -> Response:
    service = service_of(request)
    saved = _own(service, request)
    service.store.change_checkpoint(saved.path, expires_at=saved.expires_at, is_public=is_public)
    return Response(status_code=204)


def _checkpoint(saved: SavedWeights) -> dict[str, Any]:
    return {
        "checkpoint_id": saved.checkpoint_id,
        "checkpoint_type": saved.kind,
        "time": _time(saved.created_at),
        "tinker_path": saved.path,
        "size_bytes": saved.num_bytes,
        "public": saved.is_public,
        "user_metadata": dict(saved.metadata) or None,
        "expires_at": None if saved.expires_at is None else _time(saved.expires_at),
    }


def _run(service: TrainingService, model: TrainedModel) -> dict[str, Any]:
    saved = service.store.checkpoints(model.owner, model.model_id)
    newest = {kind: next((_checkpoint(each) for each in saved if each.kind == kind), None) for kind in _KINDS}
    metadata = {str(key): str(value) for key, value in model.metadata.items()}
    return {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": model.spec.rank,
        "last_request_time": _time(model.last_request_at),
        "last_checkpoint": newest["training"],
        "last_sampler_checkpoint": newest["sampler"],
        "user_metadata": metadata or None,
    }


_KINDS = ("training", "sampler")


def _cursor(offset: int, limit: int, rows: Sequence[object]) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": len(rows)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


ROUTES = [
    ("POST", "/api/v1/weights_info", weights_info, "anybody"),
    ("GET", "/api/v1/training_runs", list_runs, "anybody"),
    ("GET", _RUN, get_run, "anybody"),
    ("GET", _RUN + "/checkpoints", list_of_run, "anybody"),
    ("GET", "/api/v1/models/{run_id}/checkpoints", list_of_run, "anybody"),
    ("GET", "/api/v1/checkpoints", list_all, "anybody"),
    ("DELETE", _ONE, delete, "anybody"),
    ("POST", _ONE + "/publish", publish, "anybody"),
    ("DELETE", _ONE + "/publish", unpublish, "anybody"),
    ("PUT", _ONE + "/ttl", set_ttl, "anybody"),
    ("GET", _ONE + "/archive", archive, "anybody"),
    ("GET", _ONE + "/external_weights_urls", file_links, "anybody"),
    ("GET", "/api/v1/files/{expires}/{signature}/{folder}/{name}", download, "anybody"),
]
