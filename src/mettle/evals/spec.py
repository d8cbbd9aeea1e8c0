"""What is to be evaluated: the settings of one evaluation.

Parts: `RolloutSettings` (which model plays which environment, and how: what every command has that makes rollouts),
`EvalSpec`. Invariant: tables (arguments, sampling, headers) merge key by key from level to level, everything else is
replaced; `max_tokens` and `temperature` are sampling arguments.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator, with_config
from typing_extensions import TypedDict

from mettle.config.options import Foreign, Option

ROLLOUTS_PER_WORKER = 256
"""With `num_workers = "auto"`, a process for so many rollouts at a time; none of their own when one will do."""


def header_table(value: Any) -> Any:
    """Headers as a table, from a table or from "Name: value" lines. Raises: ValueError for other lines."""
    if isinstance(value, dict):
        return value
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) and ":" in line for line in lines):
        raise ValueError("'Name: value' lines, or a table of them")
    return {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}


def name_list(value: Any) -> Any:
    """Names as a list, from a list or from a text with commas."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return list(value) if isinstance(value, tuple) else value


def _some(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 for all")
    return value


NumOrAll = Annotated[int, Field(ge=-1), AfterValidator(_some)]


@with_config(ConfigDict(extra="allow", strict=True))
class SamplingTable(TypedDict, total=False):
    """Sampling arguments. Those named here are checked; others go to the endpoint as they are."""

    max_tokens: Annotated[int | None, Field(ge=1, description="Longest answer, in tokens."), Option("-t")]
    temperature: Annotated[float | None, Field(ge=0.0, description="0 always takes the likeliest token."), Option("-T")]


class RolloutSettings(BaseModel):
    """Which model plays which environment, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    env_id: Annotated[str, Option(also=("id",), is_argument=True)]
    """Environment, by its name or as OWNER/NAME@VERSION."""
    model: Annotated[str, Option("-m", also=("endpoint_id",))]
    """A model directory, a named endpoint, or a model at -b or at a provider."""
    api_base_url: Annotated[str | None, Option("-b")] = None
    """OpenAI-compatible endpoint, as http://127.0.0.1:8000/v1."""
    provider: Annotated[str | None, Option("-p")] = None
    """Who serves the model: openai, anthropic, openrouter, ollama, ..."""
    api_key_var: Annotated[str | None, Option("-k")] = None
    """Environment variable that holds the endpoint's key."""
    endpoints_path: Annotated[str | None, Option("-e", is_path=True)] = None
    """File of named endpoints, or its folder; configs/endpoints.toml without it."""
    api_client_type: str | None = None
    """How the endpoint is spoken to: chat, completions, responses, anthropic or tokens; chat without it."""
    tokenizer: str | None = None
    """Model directory whose tokenizer --api-client-type tokens uses."""
    headers: Annotated[dict[str, str], Option("--header", also=("header",), read=header_table, is_repeatable=True)] = {}
    """Header of each request, as 'Name: value'; repeatable."""
    headers_from_state: Annotated[
        dict[str, str],
        Option("--header-from-state", also=("header_from_state",), read=header_table, is_repeatable=True),
    ] = {}
    """Header of a rollout's requests, as 'Name: key' of its state (trajectory_id, task, ...); repeatable."""
    sampling_args: Annotated[SamplingTable, Option("-S", also=("sampling",))] = {}
    """More sampling arguments, as JSON; they outweigh -t and -T, and the environment's own."""
    env_args: Annotated[dict[str, Any], Option("-a", also=("args",))] = {}
    """Arguments of the environment, as JSON."""
    extra_env_kwargs: Annotated[dict[str, Any], Option("-x")] = {}
    """Settings of the environment once it is made, as JSON."""
    env_dir_path: Annotated[str | None, Option(is_path=True)] = None
    """Another folder that environments are in."""
    max_concurrent: Annotated[int, Field(ge=1), Option("-c")] = 32
    """Rollouts at a time, over all evaluations of a command."""
    max_retries: Annotated[int, Field(ge=0)] = 3
    """Of a request and of a rollout."""
    timeout: Annotated[float | None, Field(ge=0)] = None
    """Seconds that a rollout may take."""
    state_columns: Annotated[list[str], Option("-C", read=name_list)] = []
    """State keys to save with each rollout, separated by commas."""


class EvalSpec(RolloutSettings):
    """One evaluation."""

    NOT_SAVED: ClassVar = {"headers", "resume"}
    """Settings that are not written beside the results: headers can hold secrets."""
    FOREIGN: ClassVar = {
        **dict.fromkeys(("verbose", "disable_tui", "fullscreen", "abbreviated_summary"), Foreign()),
        "disable_env_server": Foreign(),
        "timeout_minutes": Foreign("ends an evaluation elsewhere; here timeout ends a rollout, in seconds", ()),
        "heartbeat_url": Foreign("nothing here sends heartbeats; leave it out", ()),
        **{
            f"allow_{what}_access": Foreign(f"nothing here keeps an environment from {words}; leave it out", (True,))
            for what, words in (("sandbox", "sandboxes"), ("instances", "instances"), ("tunnel", "tunnels"))
        },
    }
    """Settings of other programs: accepted where they change nothing about the results, refused where they would."""

    GROUPS: ClassVar = ("eval", "ablation")
    """Tables of a file that are evaluations."""

    name: Annotated[str | None, Option(also=("eval_name",))] = None
    """What to call the evaluation; the environment's name without it."""
    num_examples: Annotated[NumOrAll, Option("-n")] = 5
    """Tasks, -1 for all."""
    rollouts_per_example: Annotated[int, Field(ge=1), Option("-r")] = 3
    """Rollouts of each task."""
    shuffle: bool = False
    """Take tasks in a random order."""
    shuffle_seed: Annotated[int | None, Field(ge=0)] = None
    """Seed of that order; 0 without it."""
    num_workers: Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], Option("-w")] = 0
    """Processes to run rollouts in; 0 is this one, auto takes one for 256 rollouts at a time."""
    independent_scoring: Annotated[bool, Option("-i")] = False
    """Score each rollout by itself, not with its group."""
    output_dir: Annotated[str | None, Option("-o")] = None
    """Where to save; outputs/evals without it, under the environment where its source is here."""
    save_results: Annotated[bool, Option("-s")] = True
    """Save results as they come."""
    resume: Annotated[bool | str, Option("-R", also=("resume_path",))] = False
    """Continue the evaluation saved in this folder, or without a folder the newest one like this."""

    @model_validator(mode="before")
    @classmethod
    def _seed(cls, tree: Any) -> Any:
        """Without a seed, resuming would draw other tasks."""
        if isinstance(tree, dict) and tree.get("shuffle") is True and tree.get("shuffle_seed") is None:
            return {**tree, "shuffle_seed": 0}
        return tree

    @property
    def num_processes(self) -> int:
        """Worker processes; 0 runs in this one."""
        if isinstance(self.num_workers, int):
            return self.num_workers
        needed = -(-self.max_concurrent // ROLLOUTS_PER_WORKER)
        return needed if needed > 1 else 0

    @property
    def resume_path(self) -> str | None:
        """The folder to go on with, when one is named."""
        return self.resume if isinstance(self.resume, str) else None

    @property
    def title(self) -> str:
        """What to call it where several are shown."""
        return self.name or self.env_id

    def to_dict(self) -> dict[str, Any]:
        """As it is saved, so that a later command can go on without being told again."""
        return self.model_dump(exclude=self.NOT_SAVED)


def unsaved_evaluation(settings: RolloutSettings) -> EvalSpec:
    """An evaluation that plays the same, for commands that keep their rollouts themselves."""
    shared = {name: getattr(settings, name) for name in RolloutSettings.model_fields}
    return EvalSpec(**shared, save_results=False)
