"""TorchRec's unsharded modules, trained data-parallel: what sharded training has to equal.

Each rank runs the whole unsharded collection on its own batch; the dense gradients are averaged over the ranks, and
every rank makes the same step with ordinary optimizers.

A 16-bit table is a float32 one here that holds 16-bit numbers and is rounded after each step, for TorchRec's own FP16
module computes gradient and step in float16, and makes an FP16 parameter for BF16 too. Gradients are rounded where a
16-bit parameter keeps them: those of a table without a fused optimizer, and those of a replicated table, which are
rounded on each rank and averaged in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.modules.given_tables import TABLE_DTYPES
from tests.models import OPTIMIZERS, apply_optimizer_in_backward
from tests.parity.cases import DTYPES, Case, Cell
from tests.parity.policies import repaired

__all__ = ["Outputs", "Reference", "dense_optimizers", "dtype_of", "lookups", "outputs", "unsharded"]


def dtype_of(cell: Cell) -> torch.dtype:
    """Of the table's weights."""
    return TABLE_DTYPES[DTYPES[cell.dtype]]


def unsharded(
    case: Case, *, reference: bool = False, device: str = "cpu"
) -> EmbeddingBagCollection | EmbeddingCollection:
    """The collection to shard, with optimizers in backward; the reference has float32 tables and no optimizers."""
    torch.manual_seed(case.seed)
    made: EmbeddingBagCollection | EmbeddingCollection
    if case.pooled:
        made = EmbeddingBagCollection(
            tables=case.bag_configs(reference=reference),
            is_weighted=case.weights != "none",
            device=torch.device(device),
        )
    else:
        # What stands for an id outside its table is nobody's to know.
        need_indices = (case.sizes == "one" or case.dedup) and not case.takes_bad_ids
        made = EmbeddingCollection(
            tables=case.sequence_configs(reference=reference), need_indices=need_indices, device=torch.device(device)
        )
    if not reference:
        for cell in case.cells:
            choice = OPTIMIZERS[cell.optimizer]
            if choice.optimizer is not None:
                parameters = tables_of(made)[cell.name].parameters()
                apply_optimizer_in_backward(choice.optimizer, parameters, dict(choice.settings))
    return made


def tables_of(module: EmbeddingBagCollection | EmbeddingCollection) -> nn.ModuleDict:
    """The unsharded tables by name."""
    return module.embedding_bags if isinstance(module, EmbeddingBagCollection) else module.embeddings


def lookups(case: Case) -> list[tuple[Cell, str]]:
    """(table, feature) of each part of the output, in its order."""
    features = case.features()
    return [(cell, feature) for cell in case.cells for feature in features[cell.name]]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a forward gave.

    Args:
        keys: of the output.
        values: (B, dim) for each key, or (N_f, dim) of a sequence.
        integers: of a sequence, lengths and, where they are wanted, ids.
    """

    keys: list[str]
    values: list[Tensor]
    integers: list[Tensor]

    def on_the_cpu(self) -> Outputs:
        """The same there."""
        return replace(self, values=[one.cpu() for one in self.values], integers=[one.cpu() for one in self.integers])


def outputs(case: Case, module: nn.Module, features: KeyedJaggedTensor) -> Outputs:
    """Call a collection, sharded or not."""
    found = module(features)
    if case.pooled:
        values = list(found.values().split(found.length_per_key(), dim=1))
        return Outputs(keys=list(found.keys()), values=values, integers=[])
    items = dict(found.items())
    values = [one.values() for one in items.values()]
    integers = [one.lengths() for one in items.values()]
    integers += [ids for one in items.values() if (ids := one.weights_or_none()) is not None]
    return Outputs(keys=list(items), values=values, integers=integers)


def dense_optimizers(case: Case, weights: Sequence[Sequence[nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Ordinary optimizers for the parameters, per cell, of the tables without one in backward.

    Adam for float32 tables; SGD for 16-bit ones, of which torch's Adam would keep 16-bit moments.
    """
    chosen: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for cell, parameters in zip(case.cells, weights, strict=True):
        if OPTIMIZERS[cell.optimizer].optimizer is None:
            chosen[cell.dtype == "fp32"] += parameters
    made: list[torch.optim.Optimizer] = []
    if chosen[True]:
        made.append(torch.optim.Adam(chosen[True], lr=0.1))
    if chosen[False]:
        made.append(torch.optim.SGD(chosen[False], lr=0.5))
    return made


class Reference:
    """The unsharded collection of a case and its optimizers.

    Args:
        case: describes both.
        first: first values of each table.

    Attributes:
        weights: float32 weight of each table.
        slack: per replicated 16-bit table, the largest gradient of a rank so far, whose rounding may differ; else 0.
        unsure: of such tables, where gradients cancel but for their rounding: Adam goes by the sign of what is left.
        bad: per feature that takes them, ids outside their tables so far.
        optimizer: of each table with a fused optimizer, the ordinary one.
    """

    def __init__(self, case: Case, first: Sequence[Tensor]) -> None:
        self.case = case
        self.module = unsharded(case, reference=True)
        tables = tables_of(self.module)
        self.weights: dict[str, nn.Parameter] = {cell.name: tables[cell.name].weight for cell in case.cells}  # type: ignore[misc]
        self.optimizer: dict[str, torch.optim.Optimizer] = {}
        self.slack = dict.fromkeys(self.weights, 0.0)
        self.unsure: dict[str, Tensor] = {}
        self.bad = {key: 0 for key, policy in case.policies().items() if policy != "error"}
        for cell, values in zip(case.cells, first, strict=True):
            with torch.no_grad():
                self.weights[cell.name].copy_(values.to(dtype_of(cell)))
        self._dense = dense_optimizers(case, [[weight] for weight in self.weights.values()])
        for name, choice in OPTIMIZERS.items():
            mine = [self.weights[cell.name] for cell in case.cells if cell.optimizer == name]
            if mine and choice.optimizer is not None:
                one = (choice.reference or choice.optimizer)(mine, **choice.settings)  # type: ignore[call-arg]
                self.optimizer |= {cell.name: one for cell in case.cells if cell.optimizer == name}
        replicated = {layout.name for layout in case.plan().tables if layout.replicated}
        self._lazy = [cell for cell in case.cells if cell.optimizer == "adam" and cell.name not in replicated]
        self._looked_up = {
            cell.name: torch.zeros(self.weights[cell.name].size(0), dtype=torch.int32) for cell in self._lazy
        }
        self._half_replicas = {cell.name for cell in case.cells if cell.name in replicated and cell.dtype != "fp32"}

    def forward(self, features: KeyedJaggedTensor) -> Outputs:
        """As :func:`outputs` gives them."""
        given = features
        features, kept, bad = repaired(given, self.case.feature_rows(), self.case.policies())
        for key, count in bad.items():
            self.bad[key] += count
        self._note_rows(features)
        found = outputs(self.case, self.module, features)
        if not self.case.pooled and self.case.takes_bad_ids:
            keys = [feature for _, feature in lookups(self.case)]
            rows = [
                value.new_zeros(len(kept[key]), value.size(1)).index_copy(0, kept[key].nonzero().squeeze(1), value)
                for key, value in zip(keys, found.values, strict=True)
            ]
            found = replace(found, values=rows, integers=[given[key].lengths() for key in keys])
        if not self.case.pooled and features.inverse_indices_or_none() is not None:
            return self._full(features, found)
        if not self.case.pooled or self.case.weights == "none":
            return found
        # Torch's bags refuse the mean of weighted rows, so these are sums, to be divided by the number of ids.
        values = []
        for (cell, feature), one in zip(lookups(self.case), found.values, strict=True):
            values.append(one / bag_lengths(features, feature).unsqueeze(1) if cell.pooling == "mean" else one)
        return replace(found, values=values)

    def _full(self, features: KeyedJaggedTensor, found: Outputs) -> Outputs:
        """Rows, lengths and ids of the full batch, from those of the bags."""
        keys, inverse = features.inverse_indices()
        full: list[list[Tensor]] = []
        for number, (_, feature) in enumerate(lookups(self.case)):
            bags = found.integers[number].tolist()
            samples = inverse[keys.index(feature)].tolist()
            per_id = [found.values[number], *found.integers[len(found.values) + number :][:1]]
            parts = [one.split(bags) for one in per_id]
            lengths = torch.tensor([bags[bag] for bag in samples])
            full.append([lengths, *(torch.cat([part[bag] for bag in samples]) for part in parts)])
        lengths, values, *ids = map(list, zip(*full, strict=True))
        return replace(found, values=values, integers=[*lengths, *(one for column in ids for one in column)])

    def average(self) -> None:
        """Average the gradients over the ranks, rounded where a 16-bit parameter keeps them."""
        world_size = dist.get_world_size()
        self._share_rows()
        for dtype in TABLE_DTYPES.values():
            kept = [
                cell
                for cell in self.case.cells
                if dtype is (dtype_of(cell) if cell.name in self._half_replicas else torch.float32)
            ]
            if not kept:
                continue
            weights = [self.weights[cell.name] for cell in kept]
            gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
            flat = torch.cat([one.reshape(-1) for one in gradients]).to(dtype).div_(world_size)
            dist.all_reduce(flat)
            for one, part in zip(weights, flat.float().split([one.numel() for one in weights]), strict=True):
                one.grad = part.view_as(one)
            if dtype is not torch.float32:
                self._measure(kept, gradients)
        for cell in self.case.cells:
            if cell.optimizer == "none" and cell.dtype != "fp32":
                gradient = self.weights[cell.name].grad
                assert gradient is not None, "it was averaged"
                gradient.copy_(gradient.to(dtype_of(cell)))

    def step(self) -> None:
        """Update the tables with their averaged gradients, and round them."""
        for optimizer in (*dict.fromkeys(self.optimizer.values()), *self._dense):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for cell in self.case.cells:
                if cell.dtype != "fp32":
                    self.weights[cell.name].copy_(self.weights[cell.name].to(dtype_of(cell)))

    def state(self, table: str) -> dict[str, Tensor]:
        """The states of a table's optimizer, by the names of the torch class; of Adagrad without the unused count."""
        found = self.optimizer[table].state.get(self.weights[table], {})
        names = {"sum": "sum", "m": "exp_avg", "v": "exp_avg_sq", "t": "step"}
        return {names[key]: torch.as_tensor(value) for key, value in found.items() if key in names}

    def _note_rows(self, features: KeyedJaggedTensor) -> None:
        """Remember the rows that Adam updates, zero gradient or not (bags that no sample chooses have one)."""
        for cell, feature in lookups(self.case):
            if cell in self._lazy:
                self._looked_up[cell.name][features[feature].values().long()] = 1

    def _share_rows(self) -> None:
        """Rows that any rank looked up; then forget them."""
        if not self._lazy:
            return
        flat = torch.cat([self._looked_up[cell.name] for cell in self._lazy])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        for cell, rows in zip(
            self._lazy, flat.split([self.weights[one.name].size(0) for one in self._lazy]), strict=True
        ):
            self.weights[cell.name].looked_up = rows.bool()  # type: ignore[attr-defined]
            self._looked_up[cell.name].zero_()

    def _measure(self, kept: Sequence[Cell], gradients: Sequence[Tensor]) -> None:
        """How large the ranks' gradients were, against their mean."""
        flat = torch.cat([one.abs().reshape(-1) for one in gradients])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        for cell, part in zip(kept, flat.split([one.numel() for one in gradients]), strict=True):
            mean = self.weights[cell.name].grad
            assert mean is not None, "it was averaged"
            self.slack[cell.name] = max(float(part.max()), self.slack[cell.name])
            rounding = torch.finfo(dtype_of(cell)).eps * self.slack[cell.name]
            self.unsure[cell.name] = (part.view_as(mean) > 0) & (mean.abs() <= rounding)


def bag_lengths(features: KeyedJaggedTensor, feature: str) -> Tensor:
    """(B,) ids of each sample's bag of a feature, at least 1."""
    lengths = features[feature].lengths()
    inverse = features.inverse_indices_or_none()
    if inverse is not None:
        lengths = lengths[inverse[1][inverse[0].index(feature)]]
    return lengths.clamp(min=1)
