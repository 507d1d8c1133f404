"""Sharded collections as their operators (:mod:`shardrec.modules.operators`): twins for TorchScript and torch.compile.

They run in the model's process, call the model, and have every feature of it. TorchScript runs ``forward``, which
returns an ``Await``. Tracers run ``traced``. Its value gets its tensors at their first use, so that the calls before
it share an exchange. Programs that run without shardrec use the twins in :mod:`shardrec.portable.portable_bags`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from shardrec._torchscript import counts_of, list_of
from shardrec.exchange.route import Lookup
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.compiled_outputs import Deferred, DeferredJaggedTensor, DeferredKeyedTensor
from shardrec.modules.operators import Program
from shardrec.pending import Await, awaitable


def parameters_of(module: nn.Module) -> nn.Module:
    """A module that only holds another module's parameters, under their names."""
    holder = nn.Module()
    for name, parameter in module.named_parameters(recurse=False):
        holder.register_parameter(name, parameter)
    for name, child in module.named_children():
        holder.add_module(name, parameters_of(child))
    return holder


_CALLERS = count()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _next_caller() -> int:
    """A number of its own for each call that a tracer sees. Else a compiler would make two equal calls once."""
    return next(_CALLERS)


class _Live(nn.Module):
    """Base of both twins.

    Args:
        collection: the eager module.
        results: see :class:`Program`.
    """

    # Attributes for Python only, under the name that torch.jit looks for. They live as long as the scripted module.
    __jit_ignored_attributes__: ClassVar = ["program"]

    def __init__(self, collection: ShardedCollection, results: Callable[[Any], tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__()
        self.train(collection.training)
        replicas = [] if collection.replicas is None else collection.replicas.parameters
        self.program = Program(collection, collection.context, collection.input.expect, results, replicas)
        self.replicas = list_of(Tensor, replicas)
        self.number = self.program.number
        self.weighted = collection.input.expect.weighted
        self.collective = collection.context.collectives.world_size > 1
        self.anchor = torch.zeros(0, dtype=torch.float32, device=collection.device, requires_grad=True)

    @torch.jit.export
    def __getstate__(self) -> int:
        raise RuntimeError(
            "a live program looks up through the sharded model of its process, and can be neither saved, copied nor "
            "frozen: call eval() on the model and script it again, which makes a portable program"
        )
        return self.number  # TorchScript wants what it is told

    @torch.jit.export
    def __setstate__(self, state: int) -> None:
        self.number = state

    def begin(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Queue the lookup of the local batch. Returns the arguments of the operators that wait for it."""
        weights = features.weights_or_none() if self.weighted else None
        weights_require_grad = False
        if weights is not None:
            weights_require_grad = weights.requires_grad
        inverse_keys: list[str] = []
        inverse: Tensor | None = None
        indices = features.inverse_indices_or_none()
        if indices is not None:
            inverse_keys, inverse = indices
        strides: Tensor | None = None
        stride = 0
        if features.variable_stride_per_key():
            strides = features._stride_per_key_per_rank
        else:
            stride = features.stride()
        caller = -1 if self.training else -2  # the program's mode. A tracer leaves it to the module
        if not torch.jit.is_scripting():
            caller = _next_caller()
        order, ticket = torch.ops.shardrec.issue_lookup(
            self.anchor,
            self.replicas,
            features.values(),
            features.lengths_or_none(),
            features.offsets_or_none(),
            weights,
            strides,
            inverse,
            features.keys(),
            inverse_keys,
            stride,
            self.number,
            weights_require_grad,
            torch.is_grad_enabled(),
            caller,
        )
        return order, ticket


class LiveBags(_Live):
    """The twin of a :class:`ShardedEmbeddingBagCollection`, with its live parameters."""

    def __init__(self, collection: ShardedCollection, tables: nn.Module, keys: list[str], dims: list[int]) -> None:
        super().__init__(collection, lambda values: (values, values.new_empty(0), torch.empty(0, dtype=torch.int64)))
        self.embedding_bags = parameters_of(tables)
        self.feature = collection.input.expect.features[0]
        self.keys = keys
        self.dims = dims
        self.width = sum(dims)
        self.output_dtype = collection.output_dtype

    def forward(self, features: KeyedJaggedTensor) -> Await[KeyedTensor]:
        """Look up the local batch."""
        return awaitable(_finish_bags, *self.queued(features))

    @torch.jit.unused
    def traced(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The same for a tracer."""
        return DeferredKeyedTensor(Deferred(_finish_bags, *self.queued(features)), self.keys, self.dims)

    def queued(
        self, features: KeyedJaggedTensor
    ) -> tuple[Tensor, Tensor, int, int, torch.dtype, int, list[str], list[int]]:
        """Queue the lookup. Gives the arguments of :func:`_finish_bags`."""
        order, ticket = self.begin(features)
        batch = _samples(features, self.feature)
        return order, ticket, batch, self.width, self.output_dtype, self.number, self.keys, self.dims


class LiveSequences(_Live):
    """The twin of a :class:`ShardedEmbeddingCollection`, with its live parameters.

    Args:
        collection: the eager module.
        tables: its tables.
        results: see :class:`Program`.
        lookups: names and features of the output's entries.
        width: columns of every table.
        need_indices: give each JaggedTensor its ids as weights.
    """

    def __init__(
        self,
        collection: ShardedCollection,
        tables: nn.Module,
        results: Callable[[Any], tuple[Tensor, Tensor, Tensor]],
        lookups: Sequence[Lookup],
        *,
        width: int,
        need_indices: bool,
    ) -> None:
        super().__init__(collection, results)
        self.embeddings = parameters_of(tables)
        self.names = [lookup.output for lookup in lookups]
        self.features = [lookup.feature for lookup in lookups]
        self.width = width
        self.need_indices = need_indices
        self.output_dtype = collection.output_dtype

    def forward(self, features: KeyedJaggedTensor) -> Await[dict[str, JaggedTensor]]:
        """Look up the local batch."""
        return awaitable(_finish_sequences, *self.queued(features))

    @torch.jit.unused
    def traced(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The same for a tracer."""
        pending = Deferred(_finish_sequences, *self.queued(features))
        lengths = _lengths_by_key(features)
        keys = features.keys()
        return {
            name: DeferredJaggedTensor(pending, name, lengths[keys.index(feature)])
            for name, feature in zip(self.names, self.features, strict=True)
        }

    def queued(
        self, features: KeyedJaggedTensor
    ) -> tuple[Tensor, Tensor, KeyedJaggedTensor, int, torch.dtype, int, list[str], list[str], bool]:
        """Queue the lookup. Gives the arguments of :func:`_finish_sequences`."""
        order, ticket = self.begin(features)
        width, dtype, need = self.width, self.output_dtype, self.need_indices
        return order, ticket, features, width, dtype, self.number, self.names, self.features, need


def _lengths_by_key(features: KeyedJaggedTensor) -> list[Tensor]:
    """Ids per sample and key. Of the full batch, for keys with inverse indices."""
    if features.variable_stride_per_key():
        lengths = list(features.lengths().split(features.stride_per_key()))
        indices = features.inverse_indices_or_none()
        if indices is not None:
            keys, inverse = indices
            if inverse.numel() > 0 and inverse.size(0) == len(keys):
                for place, key in enumerate(features.keys()):
                    if key in keys:
                        # A bad index raises where the rows arrive.
                        bags = nn.functional.pad(lengths[place], [0, 1])
                        chosen = inverse[keys.index(key)].clamp(0, bags.size(0) - 1)
                        lengths[place] = bags.index_select(0, chosen)
        return lengths
    return list(features.lengths().view(len(features.keys()), -1).unbind(0))


def _samples(features: KeyedJaggedTensor, feature: str) -> int:
    """Number of samples of the full batch; without inverse indices, of a feature that is looked up."""
    indices = features.inverse_indices_or_none()
    if indices is not None:  # noqa: SIM102  # TorchScript refines the Optional so
        if indices[1].numel() > 0:
            full: int = indices[1].size(1)
            return full
    keys = features.keys()
    stride: int = features.stride()
    if features.variable_stride_per_key() and feature in keys:
        stride = features.stride_per_key()[keys.index(feature)]
    return stride


def _finish_bags(
    order: Tensor,
    ticket: Tensor,
    batch: int,
    width: int,
    dtype: torch.dtype,
    number: int,
    keys: list[str],
    dims: list[int],
) -> KeyedTensor:
    """Wait for the columns."""
    arrived = torch.ops.shardrec.arrive(order, ticket, order, batch, width, 0, False, dtype, number)
    return KeyedTensor(keys, dims, arrived[0])


def _finish_sequences(
    order: Tensor,
    ticket: Tensor,
    features: KeyedJaggedTensor,
    width: int,
    dtype: torch.dtype,
    number: int,
    names: list[str],
    lookups: list[str],
    need_indices: bool,
) -> dict[str, JaggedTensor]:
    """Wait for the rows."""
    rows, ids, numbers = torch.ops.shardrec.arrive(
        order, ticket, features.values(), None, width, len(names), need_indices, dtype, number
    )
    counts = counts_of(numbers, rows.size(0))
    rows_of, lengths = rows.split(counts), _lengths_by_key(features)
    ids_of = ids.split(counts) if need_indices else rows_of
    outputs: dict[str, JaggedTensor] = {}
    for place, name in enumerate(names):
        weights: Tensor | None = None
        if need_indices:
            weights = ids_of[place]
        outputs[name] = JaggedTensor(rows_of[place], weights, lengths[features.keys().index(lookups[place])])
    return outputs
