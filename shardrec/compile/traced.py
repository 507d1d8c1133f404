"""The form of a sharded module that torch.compile runs in traced mode: its twin of operators.

It is the twin that TorchScript has, too (:mod:`shardrec.modules.scripted_bags`), with live parameters, and two parts of
its own: headers and tables are operators that call back to the model, which lives beside the compiled program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.compile.agreement import Agreement
from shardrec.compile.fakes import register_fakes
from shardrec.compile.lookups import LookUp, TablesLookup
from shardrec.exchange.scripted_batch import plain
from shardrec.lookup.groups import GroupMode
from shardrec.lookup.scripted import DenseTables, NoTables
from shardrec.lookup.shards import ShardLookup, _GroupInput
from shardrec.modules.bags import ShardedEmbeddingBagCollection
from shardrec.modules.scripted_bags import ScriptedBags
from shardrec.modules.scripted_sequences import ScriptedSequences
from shardrec.modules.sequences import ShardedEmbeddingCollection

__all__ = ["Traced", "compiled_twin"]

Sharded = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
Twin = ScriptedBags | ScriptedSequences


class Traced(nn.Module):
    """A sharded module's twin as a tracer takes it: gives the value, a KeyedTensor or a dict of JaggedTensors.

    Args:
        twin: of operators and plain data.
    """

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self.twin: Any = plain(twin)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Look up the local batch."""
        return self.twin.traced(features)


def compiled_twin(collection: Sharded) -> Traced:
    """The twin that torch.compile traces; trains the collection's tables.

    Raises:
        ConfigError: for a collection with quantized comms on several ranks.
    """
    # For what a user traces beside it: fbgemm's modules, and twins made for other executors.
    register_fakes()
    agree = Agreement(collection.context, collection._expect)
    lookups = _lookups(collection._shards, collection.device)
    if isinstance(collection, ShardedEmbeddingBagCollection):
        return Traced(ScriptedBags(collection, lookups=lookups, agree=agree, portable=False))
    return Traced(ScriptedSequences(collection, lookups=lookups, agree=agree))


def _lookups(shards: ShardLookup, device: torch.device) -> nn.ModuleList:
    """One module per group; see :meth:`ShardLookup.scripted`."""
    found: list[nn.Module] = []
    for index, member in enumerate(shards._members):
        bank, width = member.bank, member.group.width
        pooled = width is None
        if bank is None and member.whole_rows is None:
            found.append(NoTables(width or 0, device))
        elif member.group.mode is GroupMode.DENSE and bank is not None:
            found.append(DenseTables(member.parameters, bank.slot_tables, pooled=pooled))
        else:
            columns = width
            if columns is None:
                columns = 0 if bank is None else sum(bank.shapes[table][1] for table in bank.slot_tables)
            found.append(TablesLookup(_of_group(shards, index), columns, pooled=pooled, device=device))
    return nn.ModuleList(found)


def _of_group(shards: ShardLookup, index: int) -> LookUp:
    def look_up(ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        member = shards._members[index]
        part = _GroupInput(ids=ids, lengths=lengths, weights=weights)
        return shards._look_up(member, part, lengths.size(1))

    return look_up
