"""The model of a run, made from the data's schema and the run's model_args, and its optimizers."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim import LAMB, PartialRowWiseAdam, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from shardrec import ConfigError, DynamicIds, ShardedModel, ShardrecError, script
from shardrec.layout import table_configs
from shardrec.planner import constraints_of
from shardrec.serve import from_tensors
from shardrec.trainer.data import ClickSchema, FeatureSpec
from shardrec.trainer.models import MODELS
from shardrec.trainer.run.config import TrainConfig
from shardrec.trainer.run.option_groups import parse_constraint
from shardrec.trainer.run.options import flag

if TYPE_CHECKING:
    from shardrec import Constraint

_FLAGS = {"embedding_dim": "dim", "dense_layers": "dense_layers", "over_layers": "hidden"}
"""Options that give a built-in model an argument."""

_TABLE_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-8}),
    "rowwise_adagrad": (RowWiseAdagrad, {"eps": 1e-8}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "partial_rowwise_adam": (PartialRowWiseAdam, {}),
    "lamb": (LAMB, {}),
}
_DENSE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def build_model(config: TrainConfig, schema: ClickSchema) -> nn.Module:
    """What the class that ``config.model.name`` names makes of the schema and ``config.model.args``.

    Returns:
        A module from (dense (B, D) float32, sparse KeyedJaggedTensor) to (B,) or (B, 1) logits. A built-in one has its
        tables on meta, the rest on the CPU.

    Raises:
        ConfigError: if the model does not exist, does not take such arguments, or makes something else.
    """
    name = config.model.name
    make = _model_class(name)
    arguments = _arguments(config, make)
    try:
        model = make(schema, **arguments)
    except (TypeError, ValueError) as error:
        arguments_text = "".join(f", {name}={value!r}" for name, value in arguments.items())
        call = f"{name.rpartition(':')[2]}(schema{arguments_text})"
        raise ConfigError(
            f"model (--model) is {name!r}: {call} fails ({error}). A model takes a "
            "shardrec.trainer.data.ClickSchema and, by name, what model_args (--model-arg) gives"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model (--model) is {name!r}: it makes a {type(model).__name__}, not an nn.Module")
    _check_tables(name, model, schema)
    return model


def _check_tables(name: str, model: nn.Module, schema: ClickSchema) -> None:
    """Check that the tables that a model looks features up in are shared and as wide as the spec says."""
    tables = {feature: table for table in table_configs(model).values() for feature in table.feature_names}
    shared: dict[str, str] = {}
    for feature, dim, shared_name in zip(schema.sparse_names, schema.dims, schema.tables, strict=True):
        table = tables.get(feature)
        if table is None:
            continue
        fault = "" if dim in (None, table.embedding_dim) else f"dim {dim}, and {table.embedding_dim} columns there"
        if shared.setdefault(shared_name, table.name) != table.name:
            fault = f"share, and its table there is {table.name!r}, the other's {shared[shared_name]!r}"
        if fault:
            raise ConfigError(
                f"feature {feature!r} has {fault}, in model (--model) {name!r}: make tables by the schema's tables "
                "and dims, as shardrec.trainer.models.parts.pooled_features does, or leave it out in the features "
                "(--features)"
            )


def _model_class(name: str) -> Callable[..., object]:
    """The class of a built-in model, or ``package.module:Model``, also looked for in the working directory."""
    module_name, _, attribute = MODELS.get(name, name).partition(":")
    if name not in MODELS and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make: Callable[..., object] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model (--model) is {name!r}: {error}. Give package.module:Model") from error
    return make


def _arguments(config: TrainConfig, make: Callable[..., object]) -> dict[str, object]:
    """The model's arguments after the schema, of the types that its signature names.

    Raises:
        ConfigError: for arguments that it does not take, or of other types.
    """
    model = config.model.name
    try:
        parameters = [*inspect.signature(make).parameters.values()][1:]
        hints = typing.get_type_hints(make.__init__ if inspect.isclass(make) else make, include_extras=True)
    except Exception:  # no function, or annotations that only type checkers can read: the call itself will tell
        parameters, hints = [inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)], {}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    arguments = dict(config.model.args)
    for option, name in _FLAGS.items() if model in MODELS else ():
        value = getattr(config.model, option)
        if value == config.options()[option].default:
            continue  # as all the built-in models have it
        if name not in names or name in arguments:
            reason = f"model_args also gives {name}" if name in arguments else f"model {model!r} has no {name}"
            raise ConfigError(f"{option} ({flag(option)}) is {value!r} and {reason}: leave it out")
        arguments[name] = value
    for name in arguments:
        if name not in names and not takes_all:
            close = difflib.get_close_matches(name, names, n=1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"model_args (--model-arg) has {name!r}, which model {model!r} does not take: {meant}"
                f"It takes {', '.join(names) or 'none'}"
            )
    return {name: _as_hinted(model, name, value, hints.get(name, object)) for name, value in arguments.items()}


def _as_hinted(model: str, name: str, value: object, hint: Any) -> object:
    """A value as its annotation has it, such as a tuple where YAML has lists. One that pydantic does not know as is."""
    try:
        adapter: TypeAdapter[object] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except Exception:  # a class with a config of its own, or no type at all
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]["msg"]
        raise ConfigError(f"model_args (--model-arg) of model {model!r}: {name} is {value!r}: {fault}") from None


def source_digest(name: str) -> str:
    """SHA-256 of the file that defines a run's model, for its checkpoints. Empty without a source."""
    make = _model_class(name)
    home = make.__module__ if inspect.isclass(make) or inspect.isfunction(make) else name.partition(":")[0]
    try:
        source = inspect.getsource(sys.modules[home])
    except (KeyError, OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()


def changed_source(name: str, saved: Mapping[str, Any]) -> str:
    """A warning, if the model's file is not as it was when a checkpoint was saved; else empty."""
    digest = saved.get("model_source")
    if not digest or digest == source_digest(name):
        return ""
    return (
        f"the source of model {name!r} has changed since the checkpoint was saved: the weights fit, but what it "
        "computes from them may differ"
    )


def export_fault(config: TrainConfig, model: nn.Module, schema: ClickSchema) -> str:
    """A warning, if ``shardrec export --to script`` would refuse a model of the user's own; else empty."""
    if config.model.name in MODELS:
        return ""
    try:
        script(from_tensors(model, list(schema.sparse_names)), portable=True)
    except ShardrecError as error:
        fault = str(error).splitlines()[0].removesuffix(" TorchScript says:")
        return f"model {config.model.name!r} trains, but shardrec export --to script will refuse it: {fault}"
    return ""


def fuse_optimizer(model: nn.Module, config: TrainConfig) -> None:
    """Give every table the config's optimizer; to be called before :func:`shardrec.shard`."""
    learning = config.learning
    cls, settings = _TABLE_OPTIMIZERS[learning.embedding_optimizer]
    for module in model.modules():
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            # A model of one's own may have given some tables an optimizer already.
            parameters = [
                parameter for parameter in module.parameters() if not getattr(parameter, "_optimizer_classes", [])
            ]
            rates = {"lr": learning.embedding_lr, "weight_decay": learning.embedding_weight_decay}
            apply_optimizer_in_backward(cls, parameters, {**rates, **settings})


def dense_optimizer(model: ShardedModel, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of everything that is not a table."""
    groups = [{"params": model.dense_parameters()}]  # of none, where tables are all that a model has
    learning = config.learning
    return _DENSE_OPTIMIZERS[learning.optimizer](groups, lr=learning.lr, weight_decay=learning.weight_decay)


def planner_constraints(
    config: TrainConfig, model: nn.Module, dynamic: Mapping[str, DynamicIds]
) -> dict[str, Constraint]:
    """The config's constraints as the planner takes them; of two for one pattern the last one holds.

    The name of a feature that one table alone looks up stands for the table, unless a table has this name itself.
    Tables with dynamic ids get the cuts that these allow, where the config says nothing of them.
    """
    tables = _tables_by_feature(model)
    own_names = {name for names in tables.values() for name in names}
    constraints = {}
    for text in config.ranks.constraint:
        pattern, limit = parse_constraint(text)
        if pattern not in own_names and len(tables.get(pattern, [])) == 1:
            (pattern,) = tables[pattern]
        constraints[pattern] = limit
    # The first that matches a table counts.
    return constraints | {name: limit for name, limit in constraints_of(dynamic).items() if name not in constraints}


def dynamic_tables(spec: FeatureSpec, model: nn.Module) -> dict[str, DynamicIds]:
    """The tables of a model's features with dynamic ids, as :func:`shardrec.shard` takes them.

    Raises:
        ConfigError: if the features of a table differ in it.
    """
    asked = {feature.name: feature.dynamic_ids for feature in spec.sparse}
    by_table: dict[str, DynamicIds | None] = {}
    for feature, tables in _tables_by_feature(model).items():
        for table in tables:
            options = asked.get(feature)
            if by_table.setdefault(table, options) != options:
                raise ConfigError(
                    f"feature {feature!r} has dynamic_ids {options} and another feature of its table {table!r} has "
                    f"{by_table[table]}: give all features of a table the same in the features file (--features)"
                )
    return {table: options for table, options in by_table.items() if options is not None}


def _tables_by_feature(model: nn.Module) -> dict[str, list[str]]:
    """The own names of the tables that look each feature up."""
    tables: dict[str, list[str]] = {}
    for config in table_configs(model).values():
        for feature in config.feature_names:
            tables.setdefault(feature, []).append(config.name)
    return tables
