"""Configuration of the orchestrator. Imports without torch; validated once, at the start of the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mettle.errors import (
    EnvironmentFault,
    InfraError,
    JudgeError,
    OverlongError,
    ProviderError,
    RolloutError,
    RolloutTimeout,
)
from mettle.orchestrator.algorithms import ENVIRONMENT, check_choice, make_algorithm
from mettle.records.versions import POLICY


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class SamplingConfig(_Section):
    """How rollouts are sampled."""

    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    """Sampling temperature; 0 is greedy (evaluations only)."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens one model call may sample; None leaves it to the engine's context length."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling. Must stay 1 in training."""
    top_k: int = Field(default=-1, ge=-1)
    """Keep the k likeliest tokens; -1 or 0 keeps all, as it must be in training."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Drop tokens less likely than this share of the likeliest. Must stay 0 in training."""
    seed: int | None = None
    """What the groups' own seeds are drawn from; None takes the orchestrator's `seed`."""

    @property
    def is_truncating(self) -> bool:
        """True when the support is cut, so that logprobs are not the policy's own."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class CurriculumConfig(_Section):
    """Which task comes next, and which groups are worth training on."""

    sampler: Literal["standard", "difficulty_pool"] = "standard"
    """`standard` goes through the data epoch by epoch; `difficulty_pool` prefers tasks of middling reward."""
    hard_below: float = 0.25
    """Tasks whose latest mean reward is at most this are hard."""
    easy_above: float = 0.75
    """Tasks whose latest mean reward is above this are easy."""
    hard_weight: float = Field(default=0.2, ge=0.0)
    """Weight of a hard task relative to a normal one."""
    easy_weight: float = Field(default=0.2, ge=0.0)
    """Weight of an easy task relative to a normal one."""
    admit_above: float | None = None
    """Online filtering: a group whose mean reward is at most this is replaced instead of trained; 0 leaves out what
    nobody solved, whatever the algorithm makes of it. None admits all."""
    admit_below: float | None = None
    """The same for a group whose mean reward is at least this; 1 leaves out what everybody solved."""
    min_advantage: float = Field(default=0.0, ge=0.0)
    """A group whose largest advantage either way is at most this, and that has no other signal, is replaced. 0 leaves
    out what is exactly equal (`filter_zero_advantages`)."""

    @model_validator(mode="after")
    def _is_used(self) -> CurriculumConfig:
        for name in POOLS if self.sampler == "standard" else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} ({value:g}) is the difficulty_pool's: set sampler to 'difficulty_pool', or leave it out"
                )
        return self

    @model_validator(mode="after")
    def _order(self) -> CurriculumConfig:
        if self.hard_below >= self.easy_above:
            raise ValueError(f"hard_below ({self.hard_below}) must be less than easy_above ({self.easy_above})")
        above, below = self.admit_above, self.admit_below
        if above is not None and below is not None and above >= below:
            raise ValueError(
                f"admit_above ({above:g}) must be less than admit_below ({below:g}), or no group is admitted"
            )
        return self


POOLS = ("hard_below", "easy_above", "hard_weight", "easy_weight")
"""What the sampler `difficulty_pool` alone asks."""


class EnvConfig(_Section):
    """One environment to draw tasks from."""

    id: str
    """What to load: a package's name, or `owner/name@version` from a Hub."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's `load_environment`."""
    ratio: float = Field(default=1.0, gt=0.0)
    """Share of the tasks relative to the other environments."""
    workers: int | None = Field(default=None, ge=0)
    """Worker processes of this environment; `env_workers` when left out."""
    name: str = ""
    """Name in metrics and in the ledger; the id's last part when left out. Unique in a run."""
    algorithm: str | None = None
    """The algorithm of this environment's groups; None: `environment` where it provides advantages, else the run's."""
    algorithm_args: dict[str, Any] = Field(default_factory=dict)
    """Options of that algorithm."""
    curriculum: CurriculumConfig | None = None
    """Which of this environment's tasks come next and which of its groups train; the run's when left out."""

    @model_validator(mode="after")
    def _default_name(self) -> EnvConfig:
        if not self.name:
            self.name = self.id.rsplit("/", 1)[-1].split("@", 1)[0]
        if self.algorithm_args and self.algorithm is None:
            raise ValueError("algorithm_args of an environment are for an algorithm of its own: name it in `algorithm`")
        return self


TRAINS_ONLY = ("ratio", "algorithm", "algorithm_args", "curriculum")
"""What an environment that is evaluated cannot be told."""


class TrainingEvalConfig(_Section):
    """Evaluation on held-out tasks."""

    envs: list[EnvConfig] = Field(default_factory=list)
    """Environments to evaluate; those of the training when empty. Their evaluation split is used."""
    num_examples: int = Field(default=64, ge=-1)
    """Tasks per environment; -1 takes all, 0 switches evaluation off."""
    rollouts_per_example: int = Field(default=1, ge=1)
    """Rollouts of each task."""
    interval: int = Field(default=0, ge=0)
    """Evaluate v{n} whenever n is a multiple of this; 0 leaves out interim evaluations."""
    at_start: bool = True
    """Evaluate v0 (the baseline)."""
    at_end: bool = True
    """Evaluate the last version."""
    pin: bool = True
    """Hold weight updates while an evaluation runs, so that all its tokens come from one version."""
    sampling: SamplingConfig | None = None
    """Sampling in evaluations; that of the training when left out."""

    @field_validator("envs")
    @classmethod
    def _only_measure(cls, envs: list[EnvConfig]) -> list[EnvConfig]:
        for env in envs:
            for name in TRAINS_ONLY:
                if getattr(env, name) != EnvConfig.model_fields[name].get_default(call_default_factory=True):
                    raise ValueError(
                        f"{name} of {env.name!r} is of training: an evaluation measures all alike; leave it out"
                    )
        return envs


class FrozenModelConfig(_Section):
    """A frozen model that algorithms ask, such as a teacher. It must have the policy's vocabulary."""

    base_url: str
    """OpenAI-compatible address, ending in /v1, whose `/completions` knows `echo` (Mettle's own engine and vLLM do)."""
    model: str
    """The model's name in requests."""
    api_key_var: str | None = None
    """Environment variable that holds the key."""
    max_concurrency: int = Field(default=32, ge=1)
    """Most requests at a time."""
    timeout_s: float = Field(default=120.0, gt=0.0)
    """A request that takes longer has failed."""

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")) or not urlsplit(url).hostname:
            raise ValueError("it is no address of a server, as in http://127.0.0.1:8000/v1")
        return url


ERROR_KINDS = tuple(
    error.kind
    for error in (RolloutError, ProviderError, EnvironmentFault, InfraError, JudgeError, RolloutTimeout, OverlongError)
)
"""The words that a failed rollout is recorded with."""


class RetryConfig(_Section):
    """What happens to a group whose rollouts failed."""

    max_attempts: int = Field(default=3, ge=1)
    """How often a task is rolled out before it is dropped. Failures while the engine or every sandbox service is gone
    don't count, and those whose worker processes died count by themselves."""
    retried: list[str] = Field(default_factory=lambda: ["provider", "sandbox", "timeout"])
    """Kinds of error worth another attempt; the others (environment, judge, overlong) drop the group at once."""
    backoff_s: float = Field(default=0.5, gt=0.0)
    """Wait before the second attempt; doubles with each further one, up to 30 s."""
    max_failed_groups: int = Field(default=8, ge=1)
    """End the run after this many groups in a row in which the environment or its rewards failed every rollout."""

    @field_validator("retried")
    @classmethod
    def _are_kinds(cls, kinds: list[str]) -> list[str]:
        if unknown := [kind for kind in kinds if kind not in ERROR_KINDS]:
            raise ValueError(f"there is no kind of error {unknown[0]!r}; there are {', '.join(ERROR_KINDS)}")
        return kinds


class BudgetConfig(_Section):
    """How long each wait may last before the run is declared stalled (seconds)."""

    inference_s: float = Field(default=600.0, gt=0.0)
    """For the engine to answer /health, at the start and after it was lost."""
    weights_s: float = Field(default=1800.0, gt=0.0)
    """For the trainer to publish a version."""
    rollouts_s: float = Field(default=1800.0, gt=0.0)
    """For any group to finish."""
    eval_s: float = Field(default=3600.0, gt=0.0)
    """For an evaluation that holds back the end of the run."""


class OrchestratorConfig(_Section):
    """Everything the orchestrator needs besides the run directory."""

    model: str = ""
    """Folder of the tokenizer and chat template; the run's own `model/` when left out."""
    served_model_name: str = "policy"
    """The model's name in requests."""
    worker_places: tuple[Path, ...] = ()
    """Ready files of the places in which workers are started; a run sets it by `deployment.ray.num_worker_places`."""
    share: Path | None = None
    """Folder of the share whose engine serves this run's adapter as `served_model_name`; a run sets it by
    `deployment.share`."""
    max_steps: int = Field(default=100, ge=0)
    """Optimiser steps of the run."""
    batch_size: int = Field(default=128, ge=1)
    """Rollouts a step; a multiple of `group_size`."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of one task that are compared with each other."""
    algorithm: str = "grpo"
    """What tokens are credited with: a name registered under `mettle.algorithms`, or `module:attribute`."""
    algorithm_args: dict[str, Any] = Field(default_factory=dict)
    """Options of the algorithm."""
    services: dict[str, FrozenModelConfig] = Field(default_factory=dict)
    """Frozen models that algorithms ask, by name; `policy` is the run's own engine."""
    max_lag: int = Field(default=1, ge=0)
    """Batch s is shipped once v{s-1-max_lag} is served; also what the dispatch aims at. 0 is synchronous."""
    max_staleness: int = Field(default=2, ge=0)
    """No token older than this many versions is trained; a group that is, is dropped and replaced."""
    envs: list[EnvConfig] = Field(min_length=1)
    """Environments to train on."""
    env_workers: int | None = Field(default=None, ge=0)
    """Processes that each environment runs in; 0 runs it in the orchestrator's own. A worker that dies is replaced.
    None: one for an environment that did not come with Mettle, the orchestrator's own for one that did."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """Sampling in training."""
    filter_zero_advantages: bool = True
    """Leave out what carries no signal, and roll out further groups in its place (see `max_backfill`)."""
    max_backfill: float = Field(1.0, gt=0.0)
    """Groups without signal that are replaced one for one in a batch, in batches. Past that a batch asks for less."""
    max_empty_batches: int = Field(default=10, ge=1)
    """End the run when this many batches' worth of groups in a row gave nothing to train on."""
    solved_reward: float = 0.95
    """A run ended by `max_empty_batches` has ended well when those groups have at least this mean reward."""
    max_inflight_groups: int | None = Field(default=None, ge=1)
    """Most groups open at once; None allows as many as a batch has."""
    min_inflight_groups: int | None = Field(default=None, ge=1)
    """Fewest groups open at once while the engine is short of memory for keys and values; None: an eighth of the most.
    A synchronous run keeps to the most, so that its seed decides what is drawn."""
    rollout_timeout_s: float = Field(default=600.0, gt=0.0)
    """A group that takes longer is ended and its rollouts count as timed out."""
    retry: RetryConfig = Field(default_factory=RetryConfig)
    """What happens to a group whose rollouts failed."""
    eval: TrainingEvalConfig = Field(default_factory=TrainingEvalConfig)
    """Evaluation on held-out tasks."""
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    """Which task comes next, and which groups are worth training on; an environment may have its own."""
    seq_len: int = Field(default=2048, ge=2)
    """Longest sample in tokens. The ends of longer ones don't train, which an event tells once, and
    `rollouts/too_long_rate` at each step."""
    budgets: BudgetConfig = Field(default_factory=BudgetConfig)
    """How long each wait may last."""
    canary_tolerance: float = Field(1e-3, gt=0.0)
    """Largest mean difference of the canary's logprobs at which an update counts; .02 if the run's engine computes in
    bfloat16 and this is not given."""
    poll_s: float = Field(default=0.01, gt=0.0)
    """How often the ledger is asked for a new version."""
    health_s: float = Field(default=2.0, gt=0.0)
    """How often the engine is asked for its health."""
    shuffle: bool = True
    """Go through each epoch in a new seeded order."""
    seed: int = 0
    """Seed of the task order and of what is sampled."""

    def curriculum_of(self, name: str) -> CurriculumConfig:
        """The curriculum of the environment called `name`."""
        own = next((env.curriculum for env in self.envs if env.name == name), None)
        return self.curriculum if own is None else own

    def choice_for(self, env: EnvConfig, *, provides_advantages: bool) -> tuple[str, dict[str, Any]]:
        """Name and options of the algorithm of an environment's groups."""
        if env.algorithm is not None:
            return env.algorithm, env.algorithm_args
        return (ENVIRONMENT, {}) if provides_advantages else (self.algorithm, self.algorithm_args)

    @property
    def kinds_of_teaching(self) -> set[str]:
        """What the algorithms of all environments say under `teaches`."""
        choices = [self.choice_for(env, provides_advantages=False) for env in self.envs]
        return {make_algorithm(*choice).teaches for choice in choices}

    def _check_algorithms(self) -> None:
        if POLICY in self.services:
            raise ValueError(
                f"a service cannot be called {POLICY!r}: that is the run's own engine; give it another name"
            )
        if {"listed", "whole"} <= self.kinds_of_teaching:
            raise ValueError(
                "some environments list a teacher's likeliest tokens and others want its whole distribution, and a "
                "batch has room for one of the two: give all a top_k, or none"
            )
        for env in self.envs:
            name, options = self.choice_for(env, provides_advantages=False)
            check_choice(
                name,
                options,
                group_size=self.group_size,
                temperature=self.sampling.temperature,
                services=self.services,
            )

    @property
    def is_synchronous(self) -> bool:
        """True when nothing stale is trained: then the same seed gives the same batches."""
        return self.max_staleness == 0

    @property
    def sampling_seed(self) -> int:
        """What the groups' seeds in training are drawn from."""
        return self.seed if self.sampling.seed is None else self.sampling.seed

    @property
    def eval_sampling_seed(self) -> int:
        """What the groups' seeds in evaluations are drawn from."""
        return self.seed if self.eval_sampling.seed is None else self.eval_sampling.seed

    @property
    def groups_per_batch(self) -> int:
        """Whole groups a batch consists of."""
        return self.batch_size // self.group_size

    @property
    def inflight_groups(self) -> int:
        """Most groups open at once."""
        return self.max_inflight_groups or self.groups_per_batch

    @property
    def fewest_inflight_groups(self) -> int:
        """Fewest groups open at once, however short of memory the engine is."""
        if self.is_synchronous:
            return self.inflight_groups
        return self.min_inflight_groups or max(1, self.inflight_groups // 8)

    @property
    def eval_envs(self) -> list[EnvConfig]:
        """Environments to evaluate."""
        return self.eval.envs or self.envs

    @property
    def eval_sampling(self) -> SamplingConfig:
        """Sampling in evaluations."""
        return self.eval.sampling or self.sampling

    @field_validator("envs")
    @classmethod
    def _unique_names(cls, envs: list[EnvConfig]) -> list[EnvConfig]:
        names = [env.name for env in envs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several environments are called {', '.join(twice)}: give each its own `name`")
        return envs

    @model_validator(mode="after")
    def _can_train(self) -> OrchestratorConfig:
        self._check_algorithms()
        if self.batch_size % self.group_size:
            lower = max(self.group_size, self.batch_size // self.group_size * self.group_size)
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of group_size ({self.group_size}): "
                f"take {lower} or {lower + self.group_size}"
            )
        if self.is_synchronous and self.min_inflight_groups is not None:
            raise ValueError(
                f"min_inflight_groups ({self.min_inflight_groups}) is of runs in which tokens may be stale: with"
                " max_staleness 0 as many groups are open as there may be; leave it out"
            )
        if (self.min_inflight_groups or 1) > self.inflight_groups:
            raise ValueError(
                f"min_inflight_groups ({self.min_inflight_groups}) is above the most that are open at once "
                f"({self.inflight_groups}): lower it, or raise max_inflight_groups"
            )
        if self.max_staleness < self.max_lag:
            raise ValueError(
                f"max_staleness ({self.max_staleness}) is below max_lag ({self.max_lag}), so every batch would be "
                f"thrown away: raise max_staleness to at least {self.max_lag}"
            )
        if self.sampling.is_truncating:
            raise ValueError(
                "top_p, top_k and min_p cut the distribution, so the recorded logprobs would not be the policy's and "
                "the importance ratio is biased: leave them at 1, -1 and 0 in [sampling] (they are fine in "
                "[eval.sampling])"
            )
        if self.sampling.temperature == 0.0:
            raise ValueError("temperature 0 samples a group of equal rollouts, which teach nothing: take 1.0")
        return self
