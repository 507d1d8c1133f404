"""Tables that cannot be cut without a change to the model: tied weights, and weights that are computed."""

from __future__ import annotations

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from shardrec.errors import ConfigError
from shardrec.layout.discover import collections_of, tables_of


def refuse_ties(model: nn.Module) -> None:
    """Raise if a table's weight is not a parameter of the table alone.

    Args:
        model: unsharded. A collection that is used in several places is one collection.

    Raises:
        ConfigError: naming the parameters that share memory, or the table with a weight that is computed from others.
    """
    for path, collection in collections_of(model).items():
        for name, table in tables_of(collection).items():
            if "weight" not in table._parameters:
                raise ConfigError(
                    f"the weight of table {name!r} of collection {path!r} is computed from other parameters "
                    "(torch.nn.utils.parametrize, or a norm), and a sharded table's rows are parameters: remove the "
                    "parametrization, or apply it to the rows that are looked up"
                )
    places = {
        path: id(module)
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection))
    }
    users: dict[object, dict[object, str]] = {}
    tables: dict[object, None] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        memory: object = id(parameter) if parameter.is_meta else (parameter.device, parameter.data_ptr())
        holder = next((path for path in places if name.startswith(f"{path}." if path else "")), None)
        user = name if holder is None else (places[holder], name.removeprefix(holder))
        users.setdefault(memory, {})[user] = name
        if holder is not None:
            tables[memory] = None
    for memory in tables:
        if len(users[memory]) > 1:
            names = ", ".join(map(repr, users[memory].values()))
            raise ConfigError(
                f"parameters {names} are tied, and a sharded table would no longer be: give each a parameter of its "
                "own, as torch.nn.Parameter(weight.detach().clone()), or use one collection in both places"
            )
