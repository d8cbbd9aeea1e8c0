"""What the JSON API answers with. Times are seconds since the epoch, durations seconds, rewards as the rubric gave."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class ShownEvaluation(BaseModel):
    """An evaluation; `mean` and the interval are null before its end, and when no rollout had a reward.

    The counts are of what is done, beside what was planned (null: not known).
    """

    eval_id: int
    kind: str = Field(description="baseline, interim, final, probe, eval, search, held_out or data")
    step: int
    env_id: str
    mean: float | None
    ci_low: float | None
    ci_high: float | None
    num_tasks: int
    num_rollouts: int
    num_errors: int
    version_min: int
    version_max: int
    metrics: dict[str, float]
    created_at: float
    state: str = Field(default="finished", description="running, finished or interrupted")
    model: str = ""
    planned_tasks: int | None = None
    planned_rollouts: int | None = None


class Evaluations(BaseModel):
    """All evaluations of a run, oldest first."""

    evals: list[ShownEvaluation]


class Process(BaseModel):
    """A process of a run as its supervisor last saw it. `is_alive` says whether the pid exists on this machine."""

    name: str
    pid: int | None
    state: str
    restarts: int
    exit_code: int | None
    started_at: float | None
    updated_at: float
    is_alive: bool | None


class Processes(BaseModel):
    """The processes of a run, by name."""

    processes: list[Process]


class ShownWait(BaseModel):
    """`owner` waits on `edge` for `target` to do what `awaits` says; past `budget_s` the run ends."""

    owner: str
    edge: str
    target: str
    awaits: str
    since: float
    waited_s: float
    budget_s: float
    is_overdue: bool
    pid: int


class ShownWaits(BaseModel):
    """Who waits for whom now, the longest wait first."""

    waits: list[ShownWait]


class Vital(BaseModel):
    """The newest sign of life of a process; `fault` is set while it stands still, and `text` says how."""

    process: str
    pid: int
    beat_age_s: float
    progress: int
    unit: str
    idle_s: float
    late_s: float
    paused_s: float
    fault: str | None
    text: str


class Vitals(BaseModel):
    """The signs of life of the processes that run, by name."""

    vitals: list[Vital]


class ShownEvent(BaseModel):
    """Something that happened once: a restart, an update refused, a stage reached."""

    event_id: int
    at: float
    source: str
    kind: str
    message: str
    data: dict[str, Any]


class Events(BaseModel):
    """Events, oldest first; ask again with `after_id` = the last id."""

    events: list[ShownEvent]


class TaskAccounts(BaseModel):
    """Task draws by state. Each draw is in exactly one, so that these add up to `total`."""

    pending: int = 0
    in_flight: int = 0
    scored: int = 0
    shipped: int = 0
    trained: int = 0
    dropped: dict[str, int] = Field(default_factory=dict, description="by reason")
    total: int = 0


class CanaryAgreement(BaseModel):
    """How far the engine's logprobs of the canary tokens were from the trainer's, over acknowledged versions."""

    version: int = Field(description="newest version that was checked")
    mean_abs_diff: float
    max_abs_diff: float
    worst_mean_abs_diff: float = Field(description="largest mean over all checked versions")
    num_versions: int
    dtype: str = Field(default="float32", description="type in which the engine computes")


class RewardNow(BaseModel):
    """Rewards of the newest full step: every rollout scored while its batch was gathered, dropped groups included."""

    step: int
    mean: float
    p10: float
    p90: float
    num_rollouts: int


class RunSummary(BaseModel):
    """The headline of a run. What has not happened yet is null."""

    name: str
    state: str = Field(description="running, finished, failed, stopped, ..., or interrupted: nobody is left to run it")
    note: str = Field(description="one sentence when the state needs one")
    is_live: bool
    env_ids: list[str]
    model: str | None
    branched_from: str | None = Field(description="version and name of the run whose first steps this one shares")
    step: int = Field(description="newest trained step")
    shipped_step: int
    max_steps: int | None
    version: int | None = Field(description="newest published policy version")
    acked_version: int | None = Field(description="newest version that every engine serves")
    started_at: float | None
    finished_at: float | None
    duration_s: float | None
    eta_s: float | None
    reward: RewardNow | None
    baselines: list[ShownEvaluation] = Field(description="one an environment")
    finals: list[ShownEvaluation] = Field(description="the newest evaluation after the baseline, one an environment")
    staleness_mean: float | None
    staleness_max: int | None
    staleness_max_ever: int | None
    staleness_limit: int | None
    mismatch_kl: float | None
    mismatch_cause: str | None = Field(
        description="why engine and trainer disagree on the same tokens; empty: they do not"
    )
    entropy: float | None
    canary: CanaryAgreement | None
    inference_tokens_per_s: float | None
    training_tokens_per_s: float | None
    num_rollouts: int
    num_errors: int
    errors_by_kind: dict[str, int]
    tasks: TaskAccounts
    restarts: int
    revision: int = Field(description="changes when earlier steps may have been written again; then read all anew")


class RunCard(BaseModel):
    """A line of the list of runs. `problem` says why a run cannot be read."""

    name: str
    state: str
    env_ids: list[str]
    model: str | None
    step: int
    max_steps: int | None
    reward: float | None
    rewards: list[float]
    baseline: float | None
    final: float | None
    started_at: float | None
    duration_s: float | None
    problem: str | None


class Runs(BaseModel):
    """The runs in the folder, newest first."""

    runs: list[RunCard]


class EvaluationCard(BaseModel):
    """A line of a list of evaluations. `name` is what it has in addresses, `problem` why it cannot be read."""

    name: str
    kind: str = Field(description="baseline, interim, final, probe, eval, search, held_out or data")
    step: int = Field(description="policy version, of an evaluation inside a run")
    eval_id: int | None
    env_id: str
    model: str
    state: str = Field(description="running, finished, interrupted or unreadable")
    mean: float | None = Field(description="mean over tasks of the reward, so far")
    ci_low: float | None
    ci_high: float | None
    error_rate: float | None
    num_rollouts: int | None
    planned_rollouts: int | None
    cost_usd: float | None
    duration_s: float | None
    written_at: float
    problem: str | None


class EvaluationCards(BaseModel):
    """The evaluations that were run by themselves, those that are live first, then the newest."""

    evaluations: list[EvaluationCard]


class EvaluationDetail(BaseModel):
    """One evaluation: its line, its statistics (as `results.stats`), and what was run."""

    card: EvaluationCard
    stats: dict[str, Any]
    metadata: dict[str, Any]


class EvaluationRollout(BaseModel):
    """A line of a list of rollouts; `index` names it within its evaluation."""

    index: int
    example_id: str
    reward: float | None
    metrics: dict[str, float]
    error_kind: str | None
    error: str | None
    stop_condition: str | None
    is_truncated: bool
    num_turns: int
    input_tokens: float | None
    output_tokens: float | None
    duration_s: float | None
    excerpt: str


class EvaluationRollouts(BaseModel):
    """A page of the rollouts of an evaluation."""

    rollouts: list[EvaluationRollout]
    total: int
    page: int
    num_pages: int


class Metrics(BaseModel):
    """Columns over one axis of steps; null where a metric has no value at that step."""

    steps: list[int]
    columns: dict[str, list[float | None]]


class MetricNames(BaseModel):
    """The metrics that a run has recorded."""

    names: list[str]


class ShownRollout(BaseModel):
    """A rollout as the ledger knows it. `step` is null until it is shipped in a batch.

    `prompt` is the beginning of what was asked, where rollouts are listed; `excerpt` of the last answer, or the error.
    """

    rollout_id: str
    kind: str
    env_id: str
    draw_id: int | None
    uid: str | None
    eval_id: int | None
    step: int | None
    position: int
    reward: float | None
    advantage: float | None
    metrics: dict[str, float]
    num_turns: int
    num_tokens: int
    version_min: int
    version_max: int
    stop_condition: str | None
    is_truncated: bool
    error_kind: str | None
    error: str | None
    duration_s: float
    created_at: float
    excerpt: str = ""
    prompt: str = ""


class RolloutPage(BaseModel):
    """A page of rollouts."""

    rollouts: list[ShownRollout]
    total: int
    page: int
    num_pages: int


class TokenColumns(BaseModel):
    """The sampled tokens of one turn, column by column. `logprobs` are natural-log probabilities as sampled."""

    ids: list[int]
    texts: list[str]
    logprobs: list[float]
    versions: list[int]
    advantages: list[float] | None = Field(default=None, description="null where the algorithm gave none")
    is_trained: list[bool] | None = Field(
        default=None, description="whether a component of the loss has the token; null where nothing says so"
    )
    trainer_logprobs: list[float | None] | None = Field(
        default=None, description="by the trainer when it trained on them, while their batch is kept; null: not trained"
    )


class TurnDetail(BaseModel):
    """One model call: the prompt ids that it adds, and what was sampled."""

    prefix_length: int
    num_prompt_tokens: int
    temperature: float
    prompt_text: str
    tokens: TokenColumns


class Sibling(BaseModel):
    """A rollout of the same group."""

    rollout_id: str
    position: int
    reward: float | None
    advantage: float | None
    num_tokens: int
    error_kind: str | None


class RolloutDetail(BaseModel):
    """One rollout opened."""

    row: ShownRollout
    messages: list[dict[str, Any]]
    turns: list[TurnDetail]
    answer: str
    info: Any = Field(default=None, description="what else the task says")
    usage: dict[str, float] | None = Field(default=None, description="tokens by the endpoint's count")
    timing: dict[str, float] = Field(default_factory=dict, description="seconds of the model, environment and scoring")
    siblings: list[Sibling]
    is_decoded: bool = Field(description="false when the run has no tokenizer to read: then texts are ids")


class LogTail(BaseModel):
    """The end of a log file."""

    name: str
    lines: list[dict[str, Any]]
    is_cut: bool


class Health(BaseModel):
    """The server answers."""

    status: str
    version: str


class ProblemDetails(BaseModel):
    """What went wrong, as RFC 9457 words it; `detail` is one sentence."""

    title: str
    status: int
    detail: str
