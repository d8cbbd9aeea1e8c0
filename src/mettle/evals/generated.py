"""What `generate` and `evaluate` give back.

Parts: `GenerateOutputs`. Invariant: it is a plain dict of `outputs` and `metadata` as they are saved; the figures are
worked out when they are asked for.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from mettle.clients.prices import Price
from mettle.evals.facts import RolloutFacts, facts_of_row
from mettle.evals.report import Stats, stats_of


class GenerateOutputs(dict[str, Any]):
    """`outputs` (one row per rollout) and `metadata`. Columns read as attributes: `results.reward`.

    `stats` holds the figures with their errors; `facts` the few figures of each rollout that they come from.
    """

    price: Price | None = None

    @cached_property
    def facts(self) -> list[RolloutFacts]:
        """The figures of each rollout, in the order in which they finished."""
        return [facts_of_row(output) for output in self.get("outputs") or []]

    @cached_property
    def stats(self) -> Stats:
        """Averages, pass@k, errors by cause, tokens, cost, timing; see `mettle.evals.report`."""
        metadata = self["metadata"]
        return stats_of(
            self.facts,
            rollouts_per_example=metadata["rollouts_per_example"],
            pass_threshold=metadata["pass_threshold"],
            pass_on=metadata.get("pass_on"),
            price=self.price,
        )

    def to_dataframe(self) -> Any:
        """A pandas `DataFrame`, a row a rollout: task, figures, each metric as `metric.NAME`, messages, answer.

        Raises: UserError when pandas is not installed.
        """
        from mettle.evals.export.frame import frame_of

        return frame_of(self.get("outputs") or [])

    def _repr_html_(self) -> str:
        """How a notebook shows the results: what was measured, its figures with intervals, the first rollouts."""
        from mettle.evals.export.frame import notebook_html

        return notebook_html(self["metadata"], self.stats, self.facts)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("__"):
            raise AttributeError(name)
        outputs = self.get("outputs") or []
        if outputs and any(name in output for output in outputs):
            return [output.get(name) for output in outputs]
        raise AttributeError(f"results have no column {name!r}")
