"""What an inference process is started with. Imports without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from mettle.config.options import Option
from mettle.inference.outside.config import OutsideConfig
from mettle.log import checked_level
from mettle.processes.host import usable_cores
from mettle.records.versions import CANARY_TOLERANCES

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes of room for an adapter that vLLM knows."""


IDLE_WITH_VLLM = ("max_prefill_tokens", "num_threads", "reuse_sampled", "record_experts")
"""What vLLM is not told."""
AUDITORS = ("device", "kv_cache_share")
"""And what the embedded engine that audits workers from outside has a use for beside it."""


class RemoteServers(BaseModel):
    """Other inference servers of ours, which this one stands in front of."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    urls: tuple[str, ...] = ()
    """Where they answer, each with /v1 at its end; requests are spread over them."""

    ready_files: tuple[Path, ...] = ()
    """In place of `urls`: the files in which they say where they answer. One that is not there yet, or not any more,
    is waited for while others answer, and may come back at another address."""

    admin_key_env: str = "METTLE_REMOTE_ADMIN_KEY"
    """The environment variable that holds their admin key; weights are handed to them with it."""

    api_key_env: str = "METTLE_REMOTE_API_KEY"
    """The environment variable that holds the key of their model routes, if they have one."""

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")) or not url.rstrip("/").endswith("/v1"):
                raise ValueError(f"{url!r} is no address of an inference server, as in http://127.0.0.1:8000/v1")
        return urls

    @model_validator(mode="after")
    def _are_named_once(self) -> Self:
        if bool(self.urls) == bool(self.ready_files):
            raise ValueError("the servers are named by urls or by ready_files: give one of the two")
        return self


class VllmSettings(BaseModel):
    """How vLLM is started: it is no dependency of ours, and stands in an environment of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    python: Path
    """The interpreter of the environment that vLLM is installed in."""

    args: tuple[str, ...] = ()
    """Further arguments of its server, as in `--enforce-eager`; they come after ours, so they count."""

    lora_rank: int | None = Field(default=None, ge=1, le=LORA_RANKS[-1])
    """Largest rank of the adapters that are served; a run with `[model] lora` sets its own. None serves none."""

    lora_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear modules, by the end of their names, that an adapter may be on."""

    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of its server."""

    start_timeout_s: float = Field(default=500.0, gt=0)
    """Seconds in which it must have loaded and compiled the model."""


class InferenceConfig(BaseModel):
    """One server with one model."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: Annotated[Path, Option(is_argument=True)]
    """Model directory in Hugging Face layout: config.json, safetensors, tokenizer.json, chat template."""

    served_model_name: Annotated[str, Option("--name")] = "policy"
    """The name that requests put in `model`, and that /v1/models lists."""

    engine: Literal["embedded", "vllm", "remote"] = "embedded"
    """What samples: the embedded engine, vLLM as a child process, or other inference servers of ours (`remote`)."""

    replicas: int = Field(default=1, ge=1, le=64)
    """Engines behind this server, each a process of its own; requests are spread over them, and an update of weights
    counts when all of them serve it."""

    remote: RemoteServers | None = None
    """The servers of engine `remote`."""

    vllm: VllmSettings | None = None
    """How engine `vllm` is started."""

    outside: OutsideConfig | None = None
    """A door for workers from outside, who sample too and are not trusted; none by default."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    allowed_hosts: tuple[str, ...] = ()
    """Further names that requests may put in `Host`. A server on 127.0.0.1 answers to the loopback's names alone, so
    that no page in a browser reaches it by a name of its own; one that is reached from elsewhere answers to any."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one, which the ready file then names."""

    version: int = Field(default=0, ge=0)
    """Policy version of the weights served at the start."""

    weights: Path | None = None
    """Published weights (a folder `v{n}`) to start from in place of the model's own; checked by their canary."""

    max_slots: int = Field(default=256, ge=1)
    """Sequences decoded at a time, if there is memory for their keys and values."""

    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Memory for keys and values, of running sequences, of prompts that are computed, and of prefixes that may come
    again; by default what `kv_cache_share` says, but not more than `max_slots` sequences could use."""

    kv_cache_share: float = Field(default=0.25, gt=0, le=1)
    """Part of the memory that is free at the start which keys and values may take, if `kv_cache_bytes` is not given."""

    reuse_sampled: bool = False
    """Whether a later prompt may read the keys and values of tokens that were sampled, so that a turn computes its new
    tokens alone. They differ in the last bits from those of a prompt, and may be gone by then, so that results are no
    longer the same to the last bit in any company; without it a turn computes the answer before it once more."""

    record_experts: bool = False
    """Whether answers of /v1/generate name the experts that a mixture's routers chose for each sampled token. A trainer
    that is given them computes with the same ones (router replay)."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt and completion together, in tokens; by default what the model allows, at most 4,096."""

    max_queue: int = Field(default=1024, ge=0)
    """Sequences that may wait for a slot; further requests get status 429."""

    max_prefill_tokens: int | None = Field(default=None, ge=1)
    """Tokens of prompts that one step computes before the running sequences go on; a longer prompt takes several. By
    default by the model's size: those of about two seconds, 128 to 2,048."""

    max_adapters: int = Field(default=16, ge=0)
    """Adapters served at a time, each under a model name of its own; a further one is refused until one is unloaded."""

    max_adapter_versions: int = Field(default=4, ge=1)
    """Versions kept of each adapter, the newest ones, for requests that pin one (`NAME@v3`). Each takes an adapter's
    memory; a share keeps one unless its files say another number."""

    seed: int | None = None
    """Seed of requests that bring none; by default they differ from run to run."""

    canary_tolerance: float | None = Field(default=None, gt=0)
    """Largest mean difference in natural-log probability between a canary and the engine; by default .001 in float32,
    which shows 1e-7, and .02 in bfloat16, which shows 3e-4 to 7e-3."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU when there is one."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and KV. float32 agrees with the trainer and is fastest on a CPU without bf16 instructions; on one
    that has them (`mettle doctor` says so) bfloat16 takes half the memory and time of large models."""

    num_threads: int | None = Field(default=None, ge=1)
    """Threads of one tensor operation; by default half of the cores that a trainer and an orchestrator leave, 1 to 8.
    On shared cores more than one is slower, on two by 4 to 15 times."""

    drain_s: float = Field(default=2.0, ge=0)
    """Seconds that running requests get to finish after SIGTERM."""

    log_level: Annotated[str, AfterValidator(checked_level)] = "INFO"
    """Least severe level that is logged to standard error."""

    @model_validator(mode="after")
    def _engine_has_what_it_needs(self) -> Self:
        if (self.engine == "remote") != (self.remote is not None):
            raise ValueError("engine 'remote' and the table 'remote' (with urls) go together: give both or neither")
        if (self.engine == "vllm") != (self.vllm is not None):
            raise ValueError("engine 'vllm' and the table 'vllm' (with python) go together: give both or neither")
        if self.engine == "vllm":
            self._vllm_honours_all()
        if self.outside is not None and self.record_experts:
            raise ValueError("record_experts and outside do not go together: nobody checks what workers say of experts")
        if self.engine == "remote" and self.replicas > 1:
            raise ValueError("replicas is for engines that this server starts; name every remote server in remote.urls")
        return self

    def _vllm_honours_all(self) -> None:
        for name in IDLE_WITH_VLLM if self.outside else (*IDLE_WITH_VLLM, *AUDITORS):
            field = type(self).model_fields.get(name)
            if field is not None and getattr(self, name) != field.default:
                raise ValueError(f"{name} is the embedded engine's; say it in vllm.args or vllm.environment")

    @property
    def start_timeout_s(self) -> float:
        """Seconds in which the server has to answer; vLLM loads and compiles for minutes."""
        return 120.0 if self.vllm is None else self.vllm.start_timeout_s + 60.0

    @field_validator("dtype", mode="before")
    @classmethod
    def _is_a_type_that_pays(cls, dtype: object) -> object:
        if isinstance(dtype, str) and dtype.lower().startswith(("int8", "int4", "fp8", "float8")):
            raise ValueError(
                f"{dtype!r} is not served: of the short types bfloat16 alone is faster on a CPU (64 rows took 6.3 ms "
                "in bfloat16 and 28 ms in int8), and the others are further from the trainer; take bfloat16"
            )
        return dtype

    @property
    def tolerance(self) -> float:
        """The canary's tolerance, by the type if none is given."""
        return self.canary_tolerance or CANARY_TOLERANCES[self.dtype]

    @property
    def threads(self) -> int:
        """`num_threads`, chosen if it is not given."""
        return self.num_threads or self._threads_of(usable_cores())

    @staticmethod
    def _threads_of(cores: int) -> int:
        # Beside it a trainer and an orchestrator want a core each, and half of the rest is left to what they start.
        return min(8, max(1, (cores - 2) // 2))


class ServeConfig(InferenceConfig):
    """A server that a person starts, with `mettle inference serve`."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    api_key: SecretStr | None = None
    """The key that requests must bring as `Authorization: Bearer KEY`; METTLE_API_KEY by default, and anybody who
    reaches the server if there is none. The admin routes want METTLE_ADMIN_KEY, and are closed without it."""

    num_threads: int | None = Field(default=None, ge=1)
    """Threads of one tensor operation; by default all cores but the one that answers, 1 to 8."""

    @staticmethod
    def _threads_of(cores: int) -> int:
        return min(8, max(1, cores - 1))
