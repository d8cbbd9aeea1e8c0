"""The policy on the trainer's side: any causal LM, whole on one device or sharded by FSDP2 (`loading`).

`Policy.forward` turns a layout into the log-probabilities of its targets. Only hidden states that predict a target go
through the vocabulary head, in chunks, so that no array of all logits exists for a large vocabulary.
Legend: B rows, T columns (t of those that ask), S segments of a row, H hidden size, K targets (U different ones), V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mettle.trainer.adapter import AdapterSlots
from mettle.trainer.grid import Grid
from mettle.trainer.layout import Index, Layout
from mettle.trainer.loss import token_logprobs
from mettle.trainer.passes import pass_price
from mettle.trainer.routers import Routers

if TYPE_CHECKING:
    from mettle.trainer.context import ContextGroup

IntRow = NDArray[np.int64]

LOGITS_AT_ONCE = 2**26
"""Logits held at a time (256 MiB in float32); more are computed in chunks and again in the backward pass."""
ATTENTION_MODELS = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
"""Models of attention alone whose config may not list its layers' kinds."""
PAIR_PRICE = 2.0
"""Attention runs at about half the speed of matrix products on a CPU (docs/explanation/training.md has the figures)."""


class ScoredTargets(NamedTuple):
    """What a forward pass says of its K targets. `divergences_K` is None where no teacher was compared with."""

    logprobs_K: Tensor
    entropies_K: Tensor
    divergences_K: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TeacherComparison:
    """What else is asked of the logits while they are there: `compare(logits [C, V], *rows [C, ...])` is [C].

    Each of `rows` is [K, ...] and is cut into the chunks that the logits are computed in.
    """

    compare: Callable[..., Tensor]
    rows: tuple[Tensor, ...]


class Policy(nn.Module):
    """A causal LM that reports log-probabilities of targets. `network` is transformers' or `dense`."""

    def __init__(self, network: nn.Module, dtype: torch.dtype, *, is_widened: bool = False) -> None:
        super().__init__()
        self.network = network
        self.dtype = dtype
        self.vocab_size: int = network.config.vocab_size  # type: ignore[union-attr, assignment]
        self.adapters = AdapterSlots(network)
        self.routers = Routers.of(network)
        self.grid = Grid()
        """How the ranks stand to each other that this is one of."""
        self.context: ContextGroup | None = None
        """The ranks that have the other tokens of this one's sequences."""
        self.is_checkpointing = False
        self.computes_short = not is_widened and next(network.parameters()).dtype != torch.float32

    def checkpoint_activations(self, is_on: bool) -> None:
        """Compute the layers again in the backward pass, instead of keeping what they computed; the numbers stay."""
        if is_on != self.is_checkpointing:
            network: Any = self.network
            # Renamed in the course of transformers 5; the old names warn.
            name = "activation" if hasattr(network, "activation_checkpointing_enable") else "gradient"
            if is_on:
                getattr(network, f"{name}_checkpointing_enable")({"use_reentrant": False})
            else:
                getattr(network, f"{name}_checkpointing_disable")()
        self.is_checkpointing = is_on

    def forward(
        self,
        layout: Layout,
        labels_K: Tensor,
        temperatures_K: Tensor,
        *,
        is_exact: bool = False,
        has_entropy_gradient: bool = False,
        comparison: TeacherComparison | None = None,
    ) -> ScoredTargets:
        """Log-probabilities and more of the K targets; `is_exact` computes in float32 whatever the config says."""
        if self.context is not None:
            return self._forward_own(
                self.context, layout, labels_K, temperatures_K, is_exact, has_entropy_gradient, comparison
            )
        mask = row_mask(layout, labels_K.device)
        return self._forward(layout, mask, labels_K, temperatures_K, is_exact, has_entropy_gradient, comparison)

    def _forward_own(
        self,
        context: ContextGroup,
        layout: Layout,
        labels_K: Tensor,
        temperatures_K: Tensor,
        is_exact: bool,
        has_entropy_gradient: bool,
        comparison: TeacherComparison | None,
    ) -> ScoredTargets:
        """This rank's columns alone, and the numbers of all targets."""
        own = context.cut(layout)
        places = torch.from_numpy(own.places).to(labels_K.device)
        mask = row_mask(own.whole, labels_K.device, own.columns)
        if comparison is not None:
            comparison = replace(comparison, rows=tuple(row[places] for row in comparison.rows))
        scored = self._forward(
            own.layout, mask, labels_K[places], temperatures_K[places], is_exact, has_entropy_gradient, comparison,
        )  # fmt: skip
        return ScoredTargets(*(None if column is None else context.whole(column, own) for column in scored))  # type: ignore[arg-type]

    def _forward(
        self,
        layout: Layout,
        mask: Tensor | None,
        labels_K: Tensor,
        temperatures_K: Tensor,
        is_exact: bool,
        has_entropy_gradient: bool,
        comparison: TeacherComparison | None,
    ) -> ScoredTargets:
        with self._precision(labels_K.device, is_exact):
            hidden_BTH = self._hidden(layout, mask, labels_K.device)
            sources_K = torch.from_numpy(layout.sources).to(labels_K.device)
            hidden_BTH = hidden_BTH.flatten(0, 1)
            if layout.num_labels > 1:
                return self._many_logprobs(
                    hidden_BTH.index_select(0, sources_K[:: layout.num_labels]), labels_K, layout
                )
            if layout.reach is None or comparison is not None:  # that has rows of each target's own to compare with
                hidden_KH = hidden_BTH.index_select(0, sources_K)
                return self._scored(hidden_KH, labels_K, temperatures_K, has_entropy_gradient, comparison)
            # Sequences that begin alike ask the same of the same state.
            asked_U, answer_K = different(sources_K, labels_K, temperatures_K)
            scored = self._scored(
                hidden_BTH.index_select(0, sources_K[asked_U]), labels_K[asked_U], temperatures_K[asked_U],
                has_entropy_gradient, None,
            )  # fmt: skip
            return ScoredTargets(
                scored.logprobs_K.index_select(0, answer_K), scored.entropies_K.index_select(0, answer_K)
            )

    def hidden_at(self, layout: Layout, device: torch.device) -> Tensor:
        """[K, H] the last hidden states that the layout's targets are predicted from."""
        with self._precision(device, False):
            hidden_BTH = self._hidden(unrouted(layout), row_mask(layout, device), device)
            return hidden_BTH.flatten(0, 1).index_select(0, torch.from_numpy(layout.sources).to(device))

    def logits_at(self, token_ids: IntRow, places: IntRow, experts: Any) -> Tensor:
        """[K, V] float32: what is said of the tokens at `places` [K] of one sequence, computed in float32 with the
        weights as they are. `experts` as a batch has them for those tokens.

        Ranks that share weights call it equally often, each with a sequence of its own.
        """
        with self._alone(places, experts):
            return self.head(self._states_before(token_ids, places)).float()

    def logprobs_at(self, token_ids: IntRow, places: IntRow, experts: Any, temperatures_K: Tensor) -> Tensor:
        """[K] float32: the log-probabilities of those tokens themselves. No array of all logits exists."""
        found = []
        with self._alone(places, experts):
            states_KH = self._states_before(token_ids, places)
            ids_K = torch.from_numpy(token_ids[places]).to(states_KH.device)
            chunk = max(1, LOGITS_AT_ONCE // self.vocab_size)
            cut = (torch.split(tensor, chunk) for tensor in (states_KH, ids_K, temperatures_K))
            for states, ids, temperatures in zip(*cut, strict=True):
                logprobs = torch.log_softmax(self.head(states).float() / temperatures[:, None], -1)
                found.append(logprobs.gather(1, ids[:, None])[:, 0])
        return torch.cat(found)

    @contextmanager
    def _alone(self, places: IntRow, experts: Any) -> Iterator[None]:
        """Compute one sequence, of which no other rank has tokens, in float32."""
        exactly = exact_weights(self.network) if self.computes_short else nullcontext()
        apart = nullcontext() if self.context is None else self.context.apart(self.network)
        with exactly, apart, self.routing(places - 1, experts):
            yield

    def _states_before(self, token_ids: IntRow, places: IntRow) -> Tensor:
        """[K, H] the last hidden states that the tokens at `places` of one sequence are predicted from."""
        device = next(self.network.parameters()).device
        body: Any = self.network.base_model
        hidden_BTH: Tensor = body(
            input_ids=torch.from_numpy(token_ids)[None].to(device), use_cache=False
        ).last_hidden_state
        return hidden_BTH[0][torch.from_numpy(places - 1).to(device)]

    def routing(self, sources: Any, experts: Any, num_labels: int = 1) -> AbstractContextManager[None]:
        """See `Routers.told`; nothing for a dense network."""
        return nullcontext() if self.routers is None else self.routers.told(sources, experts, num_labels)

    def _hidden(self, layout: Layout, mask: Tensor | None, device: torch.device) -> Tensor:
        token_ids_BT = torch.from_numpy(layout.token_ids).to(device)
        arguments: dict[str, Tensor] = {}
        if layout.form != "padded" or self.context is not None:
            arguments["position_ids"] = torch.from_numpy(layout.positions).to(device)
        if mask is not None:
            arguments["attention_mask"] = mask
        body: Any = self.network.base_model
        with self.routing(layout.sources, layout.targets.experts, layout.num_labels):
            hidden_BTH: Tensor = body(input_ids=token_ids_BT, use_cache=False, **arguments).last_hidden_state
        return hidden_BTH

    def _scored(
        self,
        hidden_KH: Tensor,
        labels_K: Tensor,
        temperatures_K: Tensor,
        has_entropy_gradient: bool,
        comparison: TeacherComparison | None,
    ) -> ScoredTargets:
        def head_scores(hidden_KH: Tensor, labels_K: Tensor, temperatures_K: Tensor, *rows: Tensor) -> ScoredTargets:
            logits_KV = self.head(hidden_KH)
            found = token_logprobs(logits_KV, labels_K, temperatures_K, has_entropy_gradient=has_entropy_gradient)
            return ScoredTargets(*found, None if comparison is None else comparison.compare(logits_KV, *rows))

        rows = (hidden_KH, labels_K, temperatures_K, *(() if comparison is None else comparison.rows))
        chunk = max(1, LOGITS_AT_ONCE // self.vocab_size)
        if len(hidden_KH) <= chunk:
            return head_scores(*rows)
        cut = (torch.split(tensor, chunk) for tensor in rows)
        pieces = [checkpoint(head_scores, *piece, use_reentrant=False) for piece in zip(*cut, strict=True)]
        logprobs, entropies, divergences = zip(*pieces, strict=True)
        compared = None if comparison is None else torch.cat(divergences)
        return ScoredTargets(torch.cat(logprobs), torch.cat(entropies), compared)

    def _many_logprobs(self, hidden_MH: Tensor, labels_K: Tensor, layout: Layout) -> ScoredTargets:
        """The same for several targets of each hidden state [M], at temperature 1; their entropies are not told."""

        def head_logprobs(hidden_MH: Tensor, labels_ML: Tensor) -> Tensor:
            return torch.log_softmax(self.head(hidden_MH).float(), dim=-1).gather(-1, labels_ML)

        cut = (
            torch.split(t, max(1, LOGITS_AT_ONCE // self.vocab_size))
            for t in (hidden_MH, labels_K.view(len(hidden_MH), -1))
        )
        pieces = [checkpoint(head_logprobs, *piece, use_reentrant=False) for piece in zip(*cut, strict=True)]
        logprobs_K = torch.cat(pieces).flatten()
        return ScoredTargets(logprobs_K, torch.zeros_like(logprobs_K))

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        head: Any = self.network.get_output_embeddings()  # type: ignore[operator]
        logits: Tensor = head(hidden)
        return logits

    def _precision(self, device: torch.device, is_exact: bool) -> AbstractContextManager[Any]:
        if self.computes_short:
            return exact_weights(self.network) if is_exact else nullcontext()
        if is_exact or self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, self.dtype)


@contextmanager
def exact_weights(network: nn.Module) -> Iterator[None]:
    """Within the block each module computes in float32 with its stored weights, which are widened while it runs."""
    kept: dict[nn.Parameter, Tensor] = {}

    def widen(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            kept[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def narrow(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = kept.pop(parameter)

    own = [module for module in network.modules() if next(module.parameters(recurse=False), None) is not None]
    # Narrowed before FSDP2 takes gathered weights away again, for a module that it gathers by itself.
    hooks = [
        hook
        for m in own
        for hook in (m.register_forward_pre_hook(widen), m.register_forward_hook(narrow, prepend=True))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, data in kept.items():
            parameter.data = data


def different(*columns_K: Tensor) -> tuple[Tensor, Tensor]:
    """[U] where each combination of values stands first, in their order, and [K] which of these each place has."""
    table = [column.cpu().numpy() for column in columns_K]
    order = np.lexsort(table[::-1])
    is_new = np.ones(len(order), bool)
    is_new[1:] = np.logical_or.reduce([column[order[1:]] != column[order[:-1]] for column in table])
    answer = np.empty_like(order)
    answer[order] = np.cumsum(is_new) - 1
    return tuple(torch.from_numpy(found).to(columns_K[0].device) for found in (order[is_new], answer))  # type: ignore[return-value]


def unrouted(layout: Layout) -> Layout:
    """The layout without the experts that were recorded: they are those of the policy, not of another model."""
    none = np.empty((len(layout.targets.experts), 0), np.int16)
    return replace(layout, targets=replace(layout.targets, experts=none))


def row_mask(layout: Layout, device: torch.device, columns: Index | None = None) -> Tensor | None:
    """[B, 1, t, T], True where a token in `columns` [t] (all of them, unless some are given) may look.

    None where the model's own mask says it all.
    """
    if layout.segments is None:
        return None
    segments_BT = torch.from_numpy(layout.segments).to(device)
    width = segments_BT.shape[1]
    columns_t = torch.arange(width, device=device) if columns is None else torch.from_numpy(columns).to(device)
    is_before_tT = columns_t[:, None] >= torch.arange(width, device=device)
    queries_Bt = segments_BT[:, columns_t]
    if layout.reach is None:
        queries_Bt1, keys_B1T = queries_Bt[:, :, None], segments_BT[:, None, :]
        return (((keys_B1T == 0) | (keys_B1T == queries_Bt1)) & is_before_tT)[:, None]
    reach_BSS = torch.from_numpy(layout.reach).to(device)
    positions_B1T = torch.from_numpy(layout.positions).to(device)[:, None]
    padding = reach_BSS.shape[1] - 1
    keys_B1T, queries_Bt = (each.where(each >= 0, padding) for each in (segments_BT[:, None], queries_Bt))
    # What each segment sees of the row, then its line for each token: no array of numbers is as large as the mask.
    limits_BST = reach_BSS.gather(2, keys_B1T.expand(-1, padding + 1, -1))
    seen_BST = positions_B1T < limits_BST
    seen_BtT = seen_BST.gather(1, queries_Bt[:, :, None].expand(-1, -1, width))
    return (seen_BtT & is_before_tT)[:, None]


@dataclass(frozen=True, slots=True)
class Traits:
    """What layouts a model allows, and the prices of one query-key pair and of one pass in tokens.

    A prompt is shared by way of a mask of its own, which only layers of full attention obey. Packing is told to the
    model by restarting positions, which every kind of attention obeys and a recurrent layer does not.
    """

    can_share: bool
    can_pack: bool
    attention_cost: float
    pass_cost: float

    @classmethod
    def of(cls, policy: Policy) -> Traits:
        kinds = layer_kinds(policy)
        can_pack = bool(kinds) and kinds <= {"full_attention", "sliding_attention"}
        pair = _pair_price(policy) if can_pack else 1.0
        num_weights = sum(parameter.numel() for parameter in policy.parameters())
        return cls(kinds == {"full_attention"}, can_pack, pair, pass_price(len(blocks(policy)), num_weights))


def layer_kinds(policy: Policy) -> set[str]:
    """What the model's layers are, in transformers' words; nothing where its config doesn't tell."""
    config: Any = policy.network.config
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and config.model_type in ATTENTION_MODELS:
        kinds = {"sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"}
    return kinds


def _pair_price(policy: Policy) -> float:
    """Operations for a query-key pair over those for a token, a layer each."""
    config: Any = policy.network.config
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    per_layer = sum(parameter.numel() for parameter in blocks(policy)[0].parameters())
    return float(PAIR_PRICE * 4 * heads * head_dim / (2 * per_layer))


def blocks(policy: Policy) -> nn.ModuleList:
    """The model's repeated layers, whatever its author called them."""
    body: Any = policy.network.base_model
    lists = [module for module in body.children() if isinstance(module, nn.ModuleList)]
    assert lists, f"{type(policy.network).__name__} has no list of layers"
    return max(lists, key=len)
