"""Which modules of a network get an adapter, by their names. Importable without torch.

Parts: `choose_targets`, `ends_with`. Names are those of modules, and of the projections of a mixture's stacked experts
(`model.layers.0.mlp.experts.up_proj`), whether a network has them or the headers of its files tell of them.
"""

from __future__ import annotations

from collections.abc import Collection

from mettle.config.complaints import nearest
from mettle.errors import UserError
from mettle.trainer.config import LoraConfig


def choose_targets(names: Collection[str], config: LoraConfig, *, head: str | None, is_tied: bool) -> list[str]:
    """Those of `names` that `config` means, in their order. `head` is the output head, which may be tied.

    Raises: UserError for a target that no name ends with, and when nothing is left to train.
    """
    if config.target_modules == "all-linear":
        chosen = [name for name in names if _is_switched_on(name, config, head)]
    else:
        for target in config.target_modules:
            if not any(ends_with(name, target) for name in names):
                known = sorted({name.rpartition(".")[2] for name in names})
                guess = nearest(target, known)
                raise UserError(
                    f"lora.target_modules: no linear module of this model is called {target!r};"
                    f"{f' did you mean {guess!r}?' if guess else ''} there are {', '.join(known)}"
                )
        chosen = [name for name in names if any(ends_with(name, target) for target in config.target_modules)]
    if is_tied:
        chosen = [name for name in chosen if name != head]
    if not chosen:
        why = "its output head is tied to the input embedding and left alone" if is_tied else "none is chosen"
        raise UserError(f"lora: there is nothing to train in this model: {why}")
    return chosen


def ends_with(name: str, target: str) -> bool:
    """Whether `target` means the module `name`."""
    return name == target or name.endswith("." + target)


def _is_switched_on(name: str, config: LoraConfig, head: str | None) -> bool:
    if name == head:
        return config.unembed
    is_attention = any("attn" in part or "attention" in part for part in name.split("."))
    return config.attention if is_attention else config.mlp
