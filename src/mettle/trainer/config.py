"""What a trainer can be told. Importable without torch.

Parts: `TrainerConfig` with its optimiser, scheduler, adapters, loss (one of `losses/`), micro batch, checkpoint and
wait tables, `SftConfig`, and how they are read from a run directory. Defaults of the trainer suit a real model, those
of the warm-up the tiny preset.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from mettle.errors import UserError
from mettle.trainer.losses import LOSSES, PolicyLoss, make_loss
from mettle.trainer.losses.cispo import CispoLoss
from mettle.trainer.losses.default import DefaultLoss
from mettle.trainer.losses.dro import DroLoss
from mettle.trainer.losses.gspo import GspoLoss
from mettle.trainer.losses.importance_sampling import ImportanceSamplingLoss
from mettle.trainer.losses.ipo import IpoLoss
from mettle.trainer.losses.masked_is import MaskedIsLoss
from mettle.trainer.losses.ppo_clip import PpoClipLoss
from mettle.trainer.losses.truncated_is import TruncatedIsLoss

Config = TypeVar("Config", bound=BaseModel)


class OptimConfig(BaseModel):
    """The optimiser."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon for the matrices inside the layers and adamw for the rest, at one learning rate."""
    lr: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Peak learning rate. 1e-6 suits billions of parameters, 1e-3 the tiny preset."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    """Decoupled weight decay, a fraction of lr a step."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this norm; a step with a non-finite norm is skipped and counted."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's; adamw has betas."""

    @field_validator("betas")
    @classmethod
    def _decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each of the two is at least 0 and less than 1, as in [0.9, 0.999]")
        return betas

    @model_validator(mode="after")
    def _is_used(self) -> OptimConfig:
        if self.type == "adamw" and self.momentum != OptimConfig.model_fields["momentum"].default:
            raise ValueError(f"momentum {self.momentum} is muon's: set type to 'muon', or leave momentum out")
        return self


class SchedulerConfig(BaseModel):
    """The learning rate over the steps: warm-up, then constant, then decay."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up; step k of w trains with k / w of the peak."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Length of the decay at the end of the run; None, or more than there are, decays from the end of the warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where the decay ends, as a share of the peak."""

    @model_validator(mode="after")
    def _is_used(self) -> SchedulerConfig:
        for name in ("decay_steps", "min_lr_ratio") if self.type == "constant" else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} {value} is of a decay, and type is 'constant': set it to 'linear' or 'cosine', or leave"
                    f" {name} out"
                )
        return self


class PluginLoss(BaseModel):
    """A loss that is not Mettle's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    """A name registered under `mettle.losses`, or `module:attribute`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its options; one that it does not know is refused."""

    @model_validator(mode="after")
    def _exists(self) -> PluginLoss:
        try:
            self.build()
        except ValueError as error:
            raise ValueError(f"type {self.type!r}: {error}") from error
        return self

    def build(self) -> PolicyLoss:
        """The loss that this configures."""
        return make_loss(self.type, self.options)


def _loss_tag(value: Any) -> str:
    kind = value.get("type", "default") if isinstance(value, dict) else getattr(value, "type", "default")
    return kind if kind in LOSSES.built_in else "plugin"


LossConfig = Annotated[
    Annotated[DefaultLoss, Tag("default")]
    | Annotated[IpoLoss, Tag("ipo")]
    | Annotated[PpoClipLoss, Tag("ppo_clip")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[TruncatedIsLoss, Tag("truncated_is")]
    | Annotated[MaskedIsLoss, Tag("masked_is")]
    | Annotated[ImportanceSamplingLoss, Tag("importance_sampling")]
    | Annotated[DroLoss, Tag("dro")]
    | Annotated[PluginLoss, Tag("plugin")],
    Discriminator(_loss_tag),
]
"""`[trainer.loss]`: `type` says which, and so which other keys there are; `default` when it is left out."""


class LoraConfig(BaseModel):
    """Low-rank adapters instead of all weights: `[model] lora` of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=16, ge=1)
    """Rank of each module's two factors."""
    alpha: float = Field(default=32.0, gt=0)
    """The factors' product counts alpha / rank times."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear modules that get an adapter, by the end of their names (`q_proj`); all-linear asks the switches below."""
    attention: bool = True
    """Whether all-linear takes the modules of attention."""
    mlp: bool = True
    """Whether all-linear takes the others inside the layers."""
    unembed: bool = False
    """Whether all-linear takes the output head; one that is tied to the input embedding is left alone either way."""
    use_rslora: bool = False
    """The factors' product counts alpha / sqrt(rank) times instead (arXiv 2312.03732)."""
    dropout: float = Field(default=0.0, ge=0, le=0)
    """Only 0: what is sampled and what is trained are the same network."""

    @model_validator(mode="after")
    def _has_targets(self) -> LoraConfig:
        is_empty = not self.target_modules or not (self.attention or self.mlp or self.unembed)
        if is_empty:
            raise ValueError("no module is to get an adapter: name target_modules, or let one of the switches be true")
        return self

    @property
    def scale(self) -> float:
        """What the product of the factors is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


class MicroBatchConfig(BaseModel):
    """How a batch is cut for the device. The cut changes speed and memory, never the gradient."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_rows: int = Field(default=128, ge=1)
    """Rows of a padded micro batch."""
    max_tokens: int = Field(default=8192, ge=1)
    """Tokens of a micro batch, padding included; a longer sequence goes alone."""
    activation_gib: float | None = Field(default=4.0, gt=0)
    """GiB for what a forward pass keeps for its backward pass; max_tokens is lowered to fit. None does not ask."""
    share_prompts: bool = True
    """Compute a prompt once for all samples that begin with it, where that saves work (see docs/explanation)."""


class CheckpointConfig(BaseModel):
    """When the state is saved, and how long it is kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    interval: int = Field(default=25, ge=1)
    """Steps between checkpoints; after a crash at most this many steps are replayed."""
    asynchronous: bool = True
    """Write from a copy in memory while training goes on, where the weights take 64 MiB or more. The copy is as large
    as weights and moments together (12 bytes a parameter) and is freed once written; false makes training wait."""
    keep_last: int = Field(default=2, ge=1)
    """Complete checkpoints kept; batches that only older ones would replay are deleted."""


class WaitConfig(BaseModel):
    """How long the trainer may wait before the wait counts as a stall."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_s: float = Field(default=600.0, gt=0)
    """For the orchestrator to ship the next batch."""
    poll_s: float = Field(default=0.004, gt=0, le=5)
    """Between two looks at the ledger."""


class MismatchConfig(BaseModel):
    """How engine and trainer are compared: the same tokens under the same weights, and the cause if they differ."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    interval: int = Field(default=10, ge=0)
    """Compare at the first two steps and at every so many; 0 never does. Several ranks share the sequences, each of
    which one rank computes whole; where they compute in another type than the weights', nothing is compared."""
    num_sequences: int = Field(default=8, ge=1)
    """Sequences of the batch that are compared."""
    tolerance: float = Field(default=2e-3, gt=0)
    """Mean difference of a sequence's logprobs, in nats, that is no news; .02 suits an engine in bfloat16."""


class DistillationConfig(BaseModel):
    """Fitting a teacher's whole distribution at each place, for algorithms that ask for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "reverse_kl"
    """forward_kl covers all that the teacher does, reverse_kl settles on what it does most, jsd lies between them."""
    jsd_weight: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Of jsd: the teacher's share in the mixture that both are compared with. Near 0 its gradient goes like that of
    forward_kl, near 1 like that of reverse_kl."""
    teacher: Path | None = None
    """Folder of a frozen model with the policy's tokenizer, in the Hugging Face layout, that the trainer holds beside
    the policy; for algorithms that list no tokens themselves."""

    @model_validator(mode="after")
    def _is_used(self) -> DistillationConfig:
        if self.divergence != "jsd" and self.jsd_weight != DistillationConfig.model_fields["jsd_weight"].default:
            raise ValueError(
                f"jsd_weight {self.jsd_weight} is of divergence 'jsd', and this is {self.divergence!r}: leave it out"
            )
        return self

    @field_validator("teacher")
    @classmethod
    def _from_anywhere(cls, folder: Path | None) -> Path | None:
        return None if folder is None else folder.resolve()  # the trainer's process may run elsewhere


class TrainerConfig(BaseModel):
    """A trainer: RUN/config/trainer.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path | None = None
    """Directory of the initial policy in the Hugging Face layout; None is RUN/model."""
    lora: LoraConfig | None = None
    """Train adapters and leave the model as it is; a run's config says it as `[model] lora`."""
    max_steps: int = Field(default=100, ge=1)
    """The run is over when this step is trained."""
    seed: int = 0
    """Seed of the process's random state (nothing random happens in a step unless the model has dropout)."""
    optim: OptimConfig = OptimConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    loss: LossConfig = DefaultLoss()
    """The loss of the `rl` component, by `type`: one of those below, or another by name or import path."""
    distillation: DistillationConfig = DistillationConfig()
    micro_batch: MicroBatchConfig = MicroBatchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    wait: WaitConfig = WaitConfig()
    mismatch: MismatchConfig = MismatchConfig()
    """Comparing what the engine recorded with what the trainer computes."""
    keep_versions: int = Field(default=8, ge=2)
    """Published versions kept on disk; must exceed the largest staleness in the run."""
    weight_broadcast: Literal["file", "gloo", "nccl"] = "file"
    """How engines get a version: from its file, or by a collective of the trainer's thread for it and all engines that
    are told of the version, over gloo between CPUs or NCCL between GPUs. Where that fails they read the file."""
    weight_broadcast_host: str = "127.0.0.1"
    """The trainer's and the engines' address for gloo's connections: a name of this host's network card where engines
    are on other hosts, which must see the run's folder."""
    canary_sequences: int = Field(default=4, ge=1)
    """Sequences published with their logprobs beside each version, for the engine to reproduce."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of forward and backward. Weights, gradients and optimiser stay float32; on most CPUs bfloat16 is slower.
    Under adapters it leaves the base as its files have it, and a CPU without such products computes in float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU when there is one."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and compute the rest again in the backward pass: a third slower, less memory."""
    compile: bool = False
    """torch.compile the forward: minutes at the start, worth it only in long runs."""
    num_replicas: int = Field(default=1, ge=1)
    """Copies of the sharded weights among the ranks (HSDP): with 2 replicas of 8 ranks the weights are cut in 4, and
    only gradients cross from copy to copy. 1 cuts them among all ranks."""
    context_parallel: int = Field(default=1, ge=1)
    """Ranks that share each sequence, for those that are too long for one: each computes some of their tokens, and only
    keys and values cross. For models of full attention; micro_batch.max_tokens is for each of them."""
    expert_parallel: int = Field(default=1, ge=1)
    """Ranks that share a mixture's experts: each has some and computes them for the tokens of all, so that tokens cross
    instead of experts. Must divide the number of experts."""
    cpu_offload: bool = False
    """Keep a GPU rank's part of weights, gradients and moments in the host's memory; a layer is copied in while it
    computes, and the optimiser steps on the CPU. For several ranks on GPUs: slower, and room for a larger model."""
    num_threads: int = Field(default=1, ge=1)
    """Threads of torch on a CPU. More than one beside other busy processes is slower, not faster."""

    def alone(self) -> TrainerConfig:
        """The config for one process, which computes the same as the ranks do together."""
        return self.model_copy(
            update={"num_replicas": 1, "context_parallel": 1, "expert_parallel": 1, "cpu_offload": False}
        )

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainerConfig:
        if self.scheduler.type != "constant" and self.scheduler.warmup_steps >= self.max_steps:
            warmup = self.scheduler.warmup_steps
            raise ValueError(f"scheduler.warmup_steps {warmup} leaves nothing to decay in {self.max_steps} steps")
        if self.lora is not None and self.optim.type == "muon":
            raise ValueError("optim.type 'muon' is for full fine-tuning: an adapter's factors are trained by 'adamw'")
        if self.weight_broadcast != "file" and self.lora is not None:
            raise ValueError(
                f"weight_broadcast {self.weight_broadcast!r} is for full weights: adapters are a few hundred kB and go"
                " by file; leave it out"
            )
        host = self.weight_broadcast_host
        if self.weight_broadcast == "file" and host != type(self).model_fields["weight_broadcast_host"].default:
            raise ValueError(
                f"weight_broadcast_host {host!r} is of a broadcast, and weight_broadcast is 'file': leave it out"
            )
        if self.compile and self.lora is not None:
            raise ValueError("compile is for full fine-tuning: set it to false, or leave lora out")
        if self.cpu_offload and self.device == "cpu":
            raise ValueError("cpu_offload is for GPUs: with device 'cpu' all is in the host's memory; leave it out")
        for name in ("context_parallel", "expert_parallel"):
            if self.compile and getattr(self, name) > 1:
                raise ValueError(f"compile is for ranks that compute by themselves: set it to false, or {name} to 1")
        return self


class ProbeConfig(BaseModel):
    """How the warm-up measures what the policy can do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str | None = None
    """Environment whose tasks and rubric are used; None takes the run's first."""
    env_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that environment; used when `env` is set."""
    num_prompts: int = Field(default=128, ge=1)
    """Tasks of the training split, drawn anew each time; held-out tasks stay unseen."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; that of the training, so that the reward is the one it will start from."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one model call; None takes the run's own limit."""
    first_step: int = Field(default=30, ge=1)
    """Step of the first measurement."""
    interval: int = Field(default=5, ge=1)
    """Steps between measurements."""

    @model_validator(mode="after")
    def _is_used(self) -> ProbeConfig:
        if self.env_args and self.env is None:
            raise ValueError("env_args are of an environment of the probe's own: name it in `env`, or leave them out")
        return self


class SftConfig(BaseModel):
    """A supervised warm-up on demonstrations: RUN/config/sft.json. The defaults are the tiny preset's recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target_reward: float = 0.5
    """The warm-up is over when a measurement reaches this mean reward. A length in steps would make the start luck."""
    max_steps: int = Field(default=400, ge=1)
    """The warm-up has failed when this step is over without the target."""
    checkpoint_s: float = Field(default=10.0, ge=0)
    """Seconds between checkpoints of the warm-up, from the newest of which it continues after a kill."""
    batch_size: int = Field(default=64, ge=1)
    """Demonstrations a step."""
    seed: int = 0
    """Order of the demonstrations and sampling of the measurements."""
    optim: OptimConfig = OptimConfig(lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01, max_grad_norm=1.0)
    scheduler: SchedulerConfig = SchedulerConfig(warmup_steps=20)
    micro_batch: MicroBatchConfig = MicroBatchConfig()
    probe: ProbeConfig = ProbeConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU when there is one."""
    num_threads: int = Field(default=1, ge=1)
    """Threads of torch on a CPU."""


def read_config(path: Path, kind: type[Config]) -> Config:
    """The resolved config of a process.

    Raises: UserError when the file is missing, is no JSON, or does not fit.
    """
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; the run was not set up completely") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise UserError(f"{path}: {where}: {first['msg']}") from error


def write_config(path: Path, config: BaseModel) -> None:
    """Write a resolved config for `read_config`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
