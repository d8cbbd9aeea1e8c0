"""Can so many ranks share a mixture's experts? Importable without torch."""

from __future__ import annotations

from collections.abc import Collection

from mettle.errors import UserError


def check_expert_ranks(nums_experts: Collection[int], num_ranks: int) -> None:
    """`nums_experts` has the number of experts of each layer that is a mixture.

    Raises: UserError for a dense model, and for experts that cannot be shared out evenly.
    """
    if not nums_experts:
        raise UserError("trainer.expert_parallel is for mixtures of experts, and this model is dense: set it to 1")
    for number in nums_experts:
        if number % num_ranks:
            raise UserError(
                f"trainer.expert_parallel {num_ranks} does not divide this model's {number} experts a layer"
            )
