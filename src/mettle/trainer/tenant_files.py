"""A tenant of an adapter on disk: PEFT's two files, the optimiser's moments, the step count; gradients if asked for.

Parts: `save_tenant`, `load_tenant`, `adapter_tensors`. A tenant that is saved and loaded takes the same next step to
the last bit. Invariant: a state is loaded onto the base that it was trained on, or not at all.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mettle.errors import StorageError, UserError
from mettle.inference.engine.adapter_files import read_adapter
from mettle.storage.files import storage_errors, write_json
from mettle.storage.weights import ADAPTER_CONFIG, ADAPTER_FILE
from mettle.trainer.adapter import Adapter, peft_config
from mettle.trainer.config import OptimConfig
from mettle.trainer.low_rank import in_file
from mettle.trainer.model import Policy
from mettle.trainer.tenant import Tenant

STATE_FILE = "tenant.json"
OPTIMISER_FILE = "optimizer.safetensors"
METADATA = {"format": "pt"}
_MOMENTS = ("exp_avg", "exp_avg_sq")


def adapter_tensors(tenant: Tenant) -> dict[str, Tensor]:
    """A tenant's factors under PEFT's names, on the CPU. On a CPU they are the live ones, not copies."""
    return in_file({name: parameter.detach().cpu().contiguous() for name, parameter in tenant.parameters.items()})


def save_tenant(
    folder: Path,
    tenant: Tenant,
    policy: Policy,
    *,
    base_digest: str,
    base: Path | None = None,
    has_gradients: bool = False,
) -> None:
    """Write a tenant's state into `folder`, which is there. The folder is an adapter that PEFT reads, too."""
    assert tenant.adapter is not None, "the base's own state is a distributed checkpoint"
    with storage_errors(folder, "writing an adapter to"):
        save_file(adapter_tensors(tenant), folder / ADAPTER_FILE, metadata=METADATA)
        save_file(_optimiser_tensors(tenant, has_gradients=has_gradients), folder / OPTIMISER_FILE, metadata=METADATA)
        write_json(folder / ADAPTER_CONFIG, peft_config(tenant.adapter, policy.network, base))
        about = {"num_steps": tenant.num_steps, "base_digest": base_digest}
        write_json(folder / STATE_FILE, about | {"lora": tenant.adapter.config.model_dump(mode="json")})


def load_tenant(
    folder: Path,
    name: str,
    policy: Policy,
    *,
    base_digest: str,
    optim: OptimConfig | None = None,
    has_optimiser: bool = True,
) -> Tenant:
    """The tenant that was saved in `folder`; without `has_optimiser` its factors alone, with a fresh optimiser.

    Raises: UserError when it is of another base, StorageError when a file is damaged.
    """
    file = read_adapter(folder)
    try:
        about = json.loads((folder / STATE_FILE).read_text())
        saved = load_file(folder / OPTIMISER_FILE) if has_optimiser else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise StorageError(f"the state of the adapter in {folder} cannot be read: {error}") from error
    if about["base_digest"] != base_digest:
        raise UserError(
            f"the adapter in {folder} is of another base: it was trained on {about['base_digest'][:12]}, this is"
            f" {base_digest[:12]}"
        )
    tenant = Tenant.of_adapter(name, Adapter.of_file(policy.network, file), optim)
    if has_optimiser:
        tenant.num_steps = int(about["num_steps"])
        _restore(tenant, saved)
    return tenant


def _optimiser_tensors(tenant: Tenant, *, has_gradients: bool) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in tenant.parameters.items():
        for moment in _MOMENTS:
            if parameter in tenant.optimizer.state:
                found[f"{moment}.{name}"] = tenant.optimizer.state[parameter][moment].detach().cpu().contiguous()
        if has_gradients and parameter.grad is not None:
            found[f"grad.{name}"] = parameter.grad.detach().cpu().contiguous()
    return found


def _restore(tenant: Tenant, saved: dict[str, Tensor]) -> None:
    for name, parameter in tenant.parameters.items():
        if f"exp_avg.{name}" in saved:
            moments = {moment: _like(parameter, saved[f"{moment}.{name}"]) for moment in _MOMENTS}
            step = torch.tensor(float(tenant.num_steps))
            tenant.optimizer.state[parameter] = {"step": step, **moments}
        if f"grad.{name}" in saved:
            parameter.grad = _like(parameter, saved[f"grad.{name}"])


def _like(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    return tensor.to(device=parameter.device, dtype=parameter.dtype, copy=True)
