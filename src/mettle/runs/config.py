"""The config of a whole run: one TOML file, the same on a laptop and on a cluster.

Parts: the shared fields at the top (which fan out to the components), one table a component, and `deployment`. The flat
schema of hosted training (`batch_size`, `rollouts_per_example`, `[sampling]`, `[[env]]`, ...) is accepted as it stands:
its fields are shared fields too. Importable without torch. Invariant: two places that disagree are an error.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mettle.inference.config import InferenceConfig
from mettle.orchestrator.config import OrchestratorConfig
from mettle.records.versions import CANARY_TOLERANCES
from mettle.runs.hosted import fan_out
from mettle.runs.ports import LOOPBACK
from mettle.runs.tracking import TrackingConfig
from mettle.trainer.config import DistillationConfig, LoraConfig, SftConfig, TrainerConfig
from mettle.trainer.losses.dro import DroLoss
from mettle.trainer.presets import PRESETS

ON_NODES = ("num_worker_places", "worker_variables", "num_sandbox_services", "sandbox_config")
"""What has no meaning without a cluster."""
OF_THE_RUN = {
    "inference.model": Path("model"), "inference.version": 0, "inference.weights": None, "trainer.model": None,
    "orchestrator.model": "",
}  # fmt: skip
"""What a run sets itself from `[model]` and from where it is, with what stands there before."""
OF_AN_ENGINE = (
    "device", "max_slots", "kv_cache_bytes", "kv_cache_share", "reuse_sampled", "record_experts", "max_model_len",
    "max_queue", "max_prefill_tokens", "num_threads", "max_adapters", "max_adapter_versions", "canary_tolerance",
)  # fmt: skip
"""What servers that run already have of their own."""
NOT_IN_A_SHARE = (
    "the runs of a share sample from adapters beside one base, and workers from outside serve whole policies, so that"
    " they would have nothing to do; leave it out, or train the run alone"
)
"""Why a share has no door."""


class ModelConfig(BaseModel):
    """The initial policy: a directory in the Hugging Face layout, or a preset made on the spot."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path | None = None
    """Directory with config.json, safetensors and tokenizer; None makes `preset`."""
    preset: str = "tiny"
    """Shape of a policy made from nothing: see `mettle.trainer.presets`."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and leave the model as it is. Shared: goes to the trainer."""

    @model_validator(mode="after")
    def _exists(self) -> ModelConfig:
        if self.path is not None and not (self.path / "config.json").exists():
            raise ValueError(
                f"path {str(self.path)!r} holds no model: it has no config.json; name a directory in the Hugging Face"
                " layout, or leave it out and a small policy is made"
            )
        if self.path is not None and self.preset != type(self).model_fields["preset"].default:
            raise ValueError(
                f"preset {self.preset!r} is made from nothing, and path {str(self.path)!r} is there already: name one"
                " of the two"
            )
        if self.path is None and self.preset not in PRESETS:
            raise ValueError(f"there is no preset {self.preset!r}; there are {', '.join(sorted(PRESETS))}")
        return self


class WarmUpConfig(BaseModel):
    """A supervised warm-up on demonstrations, before reinforcement learning starts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = False
    """A policy made from nothing needs it; one that can already speak does not."""
    demonstrations: Path | None = None
    """Chats to imitate, one a line, as `mettle data generate` writes them; None plays the environment's own."""
    sft: SftConfig = SftConfig()
    """The recipe."""

    @model_validator(mode="after")
    def _is_asked_for(self) -> WarmUpConfig:
        said = self.model_fields_set
        is_set_up = "demonstrations" in said or ("sft" in said and bool(self.sft.model_fields_set - {"seed"}))
        if is_set_up and "enabled" not in said:
            raise ValueError("demonstrations and sft are of a warm-up, which nobody has asked for: say enabled = true")
        if self.enabled and (first := self.sft.probe.first_step) > self.sft.max_steps:
            raise ValueError(
                f"sft.probe.first_step {first} is beyond sft.max_steps {self.sft.max_steps}: nothing would be measured,"
                " and the warm-up never over; lower it"
            )
        return self


class RayConfig(BaseModel):
    """What a run takes of a Ray cluster that others have started, and how long it waits for that."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = "auto"
    """Address of the cluster's head, as `10.0.0.1:6379`; auto is the one that this machine is a node of."""
    cpus_per_rank: float = Field(default=1.0, gt=0)
    """Cores of each trainer rank."""
    gpus_per_rank: float = Field(default=0.0, ge=0)
    """GPUs of each trainer rank: 0 or 1."""
    cpus_per_replica: float = Field(default=1.0, gt=0)
    """Cores of each engine."""
    gpus_per_replica: float = Field(default=0.0, ge=0)
    """GPUs of each engine; several for one that vLLM spreads over them."""
    cpus_for_owner: float = Field(default=1.0, ge=0)
    """Cores of the machine where the run was started, for the orchestrator, and for the environments' workers if they
    have no places of their own."""
    num_worker_places: int = Field(default=0, ge=0)
    """Places on the cluster's nodes, apart from each other, for the environments' worker processes; 0 has them on the
    machine where the run was started. The `workers` of an environment are spread over them, one in each where it says
    nothing of workers."""
    cpus_per_worker_place: float = Field(default=1.0, gt=0)
    """Cores of each of these places."""
    worker_variables: tuple[str, ...] = ()
    """Environment variables of the run's owner that workers in these places get, too, as OPENAI_API_KEY for a judge;
    those that begin with METTLE_ or HF_ they get anyway."""
    num_sandbox_services: int = Field(default=0, ge=0)
    """Sandbox services on the cluster's nodes, apart from each other, in which environments make their sandboxes and
    have code judged; 0 has them where an environment runs. One with a `SandboxConfig` of its own keeps to that."""
    cpus_per_sandbox_service: float = Field(default=1.0, gt=0)
    """Cores of each of these services, all of its sandboxes together."""
    sandbox_config: Path | None = None
    """TOML file of these services' settings, as for `mettle sandbox serve --config`, but for where they listen."""
    wait_for_room_s: float = Field(default=600.0, gt=0)
    """How long a process whose node is lost may wait for another place before the run ends."""
    head_loss_s: float = Field(default=60.0, gt=0)
    """Seconds without the cluster's head after which the run ends."""


class DeploymentConfig(BaseModel):
    """Where the processes run. Only this table changes between a laptop and a cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["local", "ray"] = "local"
    """Who places the processes: this machine, or a Ray cluster, for which see docs/how-to/run-on-a-cluster.md."""
    ray: RayConfig = RayConfig()
    """What engine `ray` takes of its cluster."""
    num_trainer_ranks: int = Field(default=1, ge=1)
    """Trainer processes (FSDP2 under torchrun when more than one)."""
    hub: bool = True
    """Serve the run page while the run goes."""
    hub_port: int = Field(default=0, ge=0, le=65535)
    """Port of the run page; 0 takes a free one."""
    max_restarts: int = Field(default=8, ge=0)
    """How often a process that crashes is started again in one run."""
    share: Path | None = None
    """Folder of a share (`mettle rl share`) whose trainer and engine this run uses beside others, for its adapter."""


class RunConfig(BaseModel):
    """A run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its directory; made from environment, model and time when absent."""
    max_steps: int = Field(default=100, ge=1)
    """Optimiser steps. Shared: goes to the orchestrator and the trainer."""
    seed: int = 0
    """Shared: goes to the policy, the warm-up, the orchestrator, the trainer and the engine."""
    model: ModelConfig = ModelConfig()
    warm_up: WarmUpConfig = WarmUpConfig()
    orchestrator: OrchestratorConfig
    trainer: TrainerConfig = TrainerConfig()
    inference: InferenceConfig = InferenceConfig(model=Path("model"))
    deployment: DeploymentConfig = DeploymentConfig()
    tracking: TrackingConfig = TrackingConfig()
    """Where the figures go besides the run's own page."""

    batch_size: int | None = None
    """Hosted spelling of orchestrator.batch_size."""
    rollouts_per_example: int | None = None
    """Hosted spelling of orchestrator.group_size."""
    learning_rate: float | None = None
    """Hosted spelling of trainer.optim.lr."""
    max_async_level: int | None = None
    """Hosted spelling of orchestrator.max_lag."""
    env: list[dict[str, Any]] | None = None
    """Hosted spelling of orchestrator.envs."""
    sampling: dict[str, Any] | None = None
    """Hosted spelling of orchestrator.sampling."""
    eval: dict[str, Any] | None = None
    """Hosted spelling of orchestrator.eval."""
    val: dict[str, Any] | None = None
    """Hosted spelling of orchestrator.eval, under its other name."""
    wandb: dict[str, Any] | None = None
    """Hosted spelling of tracking.wandb."""
    lora_rank: int | None = None
    """Hosted spelling of model.lora.rank; it or lora_alpha makes the run train adapters."""
    lora_alpha: float | None = None
    """Hosted spelling of model.lora.alpha."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        tree = fan_out(tree)
        if isinstance(tree.get("inference"), dict):  # The engine serves the run's own policy; `create` fills in where.
            tree["inference"].setdefault("model", "model")
            _allow_for_type(tree)
            _make_room_for_adapters(tree["inference"], tree["model"] if isinstance(tree.get("model"), dict) else {})
        return tree

    @model_validator(mode="after")
    def _ranks_fit(self) -> RunConfig:
        ranks, trainer = self.deployment.num_trainer_ranks, self.trainer
        groups = {name: getattr(trainer, name) for name in ("num_replicas", "context_parallel", "expert_parallel")}
        if ranks % math.prod(groups.values()):
            told = " times ".join(f"{name} {number}" for name, number in groups.items() if number > 1)
            raise ValueError(
                f"trainer.{told} does not divide deployment.num_trainer_ranks {ranks}:"
                " each group has equally many ranks"
            )
        if trainer.cpu_offload and ranks == 1:
            raise ValueError(
                "trainer.cpu_offload is for several ranks: leave it out, or raise deployment.num_trainer_ranks"
            )
        return self

    @model_validator(mode="after")
    def _teacher_is_there(self) -> RunConfig:
        is_wanted = "whole" in self.orchestrator.kinds_of_teaching
        if is_wanted and self.trainer.distillation.teacher is None:
            raise ValueError(
                "an algorithm wants a teacher's whole distribution, and the trainer has no teacher: name a model folder"
                " in trainer.distillation.teacher, or give the algorithm a top_k and a service to ask"
            )
        divergence = self.trainer.distillation.divergence
        if divergence != DistillationConfig().divergence and not any(self.orchestrator.kinds_of_teaching):
            raise ValueError(
                f"trainer.distillation.divergence {divergence!r} is for nothing: no environment's algorithm fits the"
                " policy to a teacher's distribution; take 'distillation', or leave it out"
            )
        if self.trainer.distillation.teacher is not None and not is_wanted:
            raise ValueError(
                "trainer.distillation.teacher is held for nothing: no environment's algorithm wants a teacher's whole"
                " distribution; take algorithm 'distillation' without top_k, or leave the teacher out"
            )
        return self

    @model_validator(mode="after")
    def _may_be_open(self) -> RunConfig:
        if self.inference.outside is None:
            return self
        if self.deployment.share is not None:
            raise ValueError(f"inference.outside: {NOT_IN_A_SHARE}")
        if (lag := self.inference.outside.max_lag) > (oldest := self.orchestrator.max_staleness):
            raise ValueError(
                f"inference.outside.max_lag {lag} is more than orchestrator.max_staleness {oldest}: what is sampled so"
                " far behind would be thrown away"
            )
        if self.inference.outside.folder is not None:
            raise ValueError("inference.outside.folder is the run's own; leave it out")
        return self

    @model_validator(mode="after")
    def _places_are_the_runs(self) -> RunConfig:
        if self.orchestrator.worker_places:
            raise ValueError("orchestrator.worker_places is the run's own; say deployment.ray.num_worker_places")
        if self.orchestrator.share is not None and self.deployment.share is None:
            raise ValueError("orchestrator.share is the run's own; say deployment.share")
        return self

    @model_validator(mode="after")
    def _engine_is_the_runs(self) -> RunConfig:
        for key, before in OF_THE_RUN.items():
            table, _, name = key.partition(".")
            if (value := getattr(getattr(self, table), name)) != before:
                raise ValueError(
                    f"{key} {str(value)!r} would be ignored: a run serves and trains the policy of [model], from the"
                    " version that it has reached; leave it out"
                )
        engine, asked = self.inference, self.orchestrator.served_model_name
        if self.deployment.share is None and engine.served_model_name != asked:
            raise ValueError(
                f"inference.served_model_name {engine.served_model_name!r} is not what requests ask for"
                f" (orchestrator.served_model_name {asked!r}): set both to one name, or leave both out"
            )
        if engine.engine == "remote" and engine.outside is None:
            for name in OF_AN_ENGINE:
                if (value := getattr(engine, name)) != InferenceConfig.model_fields[name].default:
                    raise ValueError(
                        f"inference.{name} {value!r} is for an engine that the run starts; the servers in"
                        " inference.remote run already, with settings of their own: leave it out"
                    )
        return self

    @model_validator(mode="after")
    def _placeable(self) -> RunConfig:
        if self.deployment.engine == "local":
            for name in ON_NODES:
                if getattr(self.deployment.ray, name):
                    raise ValueError(
                        f"deployment.ray.{name} is of deployment.engine 'ray'; with 'local' everything runs on this"
                        " machine: leave it out"
                    )
            return self
        if self.deployment.share is not None:
            raise ValueError("deployment.share is of one machine; leave it out, or deployment.engine 'ray'")
        if self.inference.engine == "remote":
            raise ValueError(
                "inference.engine 'remote' names servers that run already; with deployment.engine 'ray' the run places"
                " its own: take 'embedded' or 'vllm'"
            )
        if self.deployment.ray.num_worker_places:
            self._check_worker_places(self.deployment.ray.num_worker_places)
        elif self.deployment.ray.worker_variables:
            raise ValueError(
                "deployment.ray.worker_variables go to workers in places on nodes, and there are none: give"
                " num_worker_places, or leave it out"
            )
        if self.deployment.ray.sandbox_config is not None and not self.deployment.ray.num_sandbox_services:
            raise ValueError(
                "deployment.ray.sandbox_config is of services on nodes, and there are none: give num_sandbox_services,"
                " or leave it out"
            )
        return self

    def _check_worker_places(self, places: int) -> None:
        """Raises: ValueError for places that would stand empty, or that the engine could not be reached from."""
        if (host := self.inference.host) != LOOPBACK:
            raise ValueError(
                f"inference.host {host!r}: with deployment.ray.num_worker_places the server in front of the engines"
                " listens on its node's address in the cluster; leave it out"
            )
        envs, default = [*self.orchestrator.envs, *self.orchestrator.eval.envs], self.orchestrator.env_workers
        asked = [default if env.workers is None else env.workers for env in envs]
        wanted = sum(places if workers is None else workers for workers in asked)
        if wanted < places:
            raise ValueError(
                f"deployment.ray.num_worker_places {places} is more than the {wanted} workers that the environments"
                " have (orchestrator.env_workers, or `workers` of an environment): some would stand empty"
            )

    @model_validator(mode="after")
    def _allows_for_lag(self) -> RunConfig:
        staleness, loss = self.orchestrator.max_staleness, self.trainer.loss.build()
        if staleness and loss.ratio == "none":
            raise ValueError(
                f"trainer.loss.ratio 'none' takes every token as sampled from the policy of its step, and"
                f" orchestrator.max_staleness {staleness} lets older ones in: set max_lag and max_staleness to 0, or"
                " ratio to 'token'"
            )
        if staleness and isinstance(loss, DroLoss) and not loss.kl_tau:
            raise ValueError(
                f"trainer.loss.kl_tau 0: nothing but this penalty holds dro near the sampler, and"
                f" orchestrator.max_staleness is {staleness}: set max_lag and max_staleness to 0, or leave kl_tau out"
            )
        return self

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        if self.trainer.keep_versions <= self.orchestrator.max_staleness:
            raise ValueError(
                f"trainer.keep_versions {self.trainer.keep_versions} must exceed"
                f" orchestrator.max_staleness {self.orchestrator.max_staleness}:"
                " a version is kept while its tokens may still train"
            )
        lora, vllm = self.trainer.lora, self.inference.vllm
        if lora is not None and vllm is not None and (vllm.lora_rank or 0) < lora.rank:
            raise ValueError(
                f"inference.vllm.lora_rank {vllm.lora_rank} is less than the run's own model.lora.rank {lora.rank};"
                " leave it out, and it is the run's"
            )
        return self


def _allow_for_type(tree: dict[str, Any]) -> None:
    """An engine in bfloat16 differs from its trainer by what rounding does, which is no news to anybody."""
    dtype = tree["inference"].get("dtype")
    tolerance = CANARY_TOLERANCES.get(dtype) if isinstance(dtype, str) else None
    if tolerance is None or dtype == "float32":
        return
    for table, key in ((tree.setdefault("orchestrator", {}), "canary_tolerance"), (tree.setdefault("trainer", {}), "")):
        if isinstance(table, dict) and key:
            table.setdefault(key, tolerance)
        elif isinstance(table, dict) and isinstance(compared := table.setdefault("mismatch", {}), dict):
            compared.setdefault("tolerance", tolerance)


def _make_room_for_adapters(inference: dict[str, Any], model: dict[str, Any]) -> None:
    """vLLM must be started for the adapters that the run will train."""
    lora, vllm = model.get("lora"), inference.get("vllm")
    if not isinstance(lora, dict) or not isinstance(vllm, dict):
        return
    vllm.setdefault("lora_rank", lora.get("rank", LoraConfig().rank))
    if isinstance(targets := lora.get("target_modules"), list | tuple):
        vllm.setdefault("lora_modules", list(targets))
