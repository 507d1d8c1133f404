"""The fused optimizers of a sharded model as one torch optimizer: learning rates to schedule, states to save.

With ``update="backward"`` the weights are updated inside backward, so ``step()`` has nothing to do, and what a
scheduler writes into ``param_groups[i]["lr"]`` reaches the kernels at the next lookup. With ``update="step"``,
``step()`` updates them, by the learning rates of that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from shardrec.errors import ConfigError
from shardrec.exchange.backward_watch import weak_hook
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.grad_scaler import TableGradients
from shardrec.step.context import ModelContext

__all__ = ["FusedOptimizers", "NoFusedOptimizer"]


class NoFusedOptimizer(ConfigError, AttributeError):
    """The model has no fused optimizers; an AttributeError, so that ``hasattr`` returns False."""


class FusedOptimizers(KeyedOptimizer):  # type: ignore[misc]  # torchrec has no types
    """A view of the optimizers that update the tables of this rank.

    It is a ``KeyedOptimizer``, so TorchRec's ``CombinedOptimizer`` and ``WarmupOptimizer`` accept it.

    ``param_groups`` has one group for each distinct optimizer setting (class, learning rate, betas, ...), the same on
    every rank; its ``params`` are this rank's shards, possibly none, and ``tables`` the names of all its tables.
    ``state[param]`` holds views of the states: ``sum`` for Adagrad (one value per row if rowwise), ``exp_avg``,
    ``exp_avg_sq`` and ``step`` for Adam. ``params`` has this rank's shards by name.

    With ``update="step"`` the first group has a placeholder behind its shards, for ``torch.amp.GradScaler``.

    Args:
        collections: the sharded collections of a model.
        names: of their parameters in the model, by id.
        context: of the model.

    Raises:
        NoFusedOptimizer: if no table has a fused optimizer; a ConfigError and an AttributeError.
    """

    def __init__(
        self, collections: Iterable[ShardedCollection], names: Mapping[int, str], context: ModelContext
    ) -> None:
        self._collections = list(collections)
        tables, params = self._by_spec()
        if not tables:
            raise NoFusedOptimizer(
                "no table of this model has a fused optimizer; give the tables one with apply_optimizer_in_backward "
                "before sharding, or use an ordinary optimizer over model.parameters()"
            )
        self._specs, self._tables = list(tables), list(tables.values())
        groups = [{"params": params[spec], "tables": tables[spec], **_settings(spec)} for spec in self._specs]
        # KeyedOptimizer's own takes states and groups that are there already, and has no add_param_group.
        torch.optim.Optimizer.__init__(self, groups, {})
        self.defaults["_save_param_groups"] = False  # CombinedOptimizer asks for one value of all its optimizers
        self._saves_groups = True
        self.params = {names[id(parameter)]: parameter for group in self.param_groups for parameter in group["params"]}
        self._at_step = context.options.updates_at_step
        if self._at_step:
            placeholder = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=context.device))
            placeholder.grad = self._gradients = TableGradients.of(self._row_gradients, context.device)
            self.param_groups[0]["params"].append(placeholder)
        self._table_of: dict[nn.Parameter, str] = {}
        self._shown: dict[nn.Parameter, int] = {}  # counts of updates, as they were written into the states
        self._refresh()
        context.life_cycle.look_up_begins.append(weak_hook(self.push))

    add_param_group = torch.optim.Optimizer.add_param_group

    def _by_spec(self) -> tuple[dict[FusedOptimizer, list[str]], dict[FusedOptimizer, list[nn.Parameter]]]:
        """Per optimizer, the names of its tables and this rank's shards of them."""
        tables: dict[FusedOptimizer, list[str]] = {}
        params: dict[FusedOptimizer, list[nn.Parameter]] = {}
        for collection in self._collections:
            for name, optimizer in collection.fused_optimizers().items():
                table = collection.tables()[name]
                tables.setdefault(optimizer, []).append(table.layout.name)
                params.setdefault(optimizer, []).extend(table.locals.values())
        return tables, params

    def follow(self, names: Mapping[int, str]) -> None:
        """Have the shards of another plan, by the names of the model's parameters; settings stay."""
        before, (_, params) = set(self._table_of), self._by_spec()
        for spec, group in zip(self._specs, self.param_groups, strict=True):
            group["params"][:] = params[spec] + [parameter for parameter in group["params"] if parameter not in before]
        others = {name: parameter for name, parameter in self.params.items() if parameter not in before}
        self.params.clear()  # in place: wrappers have it, such as WarmupOptimizer
        self.params.update(
            others | {names[id(parameter)]: parameter for of_spec in params.values() for parameter in of_spec}
        )
        for parameter in before:
            self.state.pop(parameter, None)
        self._table_of.clear()
        self._shown.clear()
        self._refresh()
        self.push()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the tables with the gradients of all backward calls since the last step; every rank calls it.

        With ``update="backward"``, hands the learning rates to the kernels.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.push()
        if self._at_step:
            for collection in self._collections:
                collection.step()
        self._show_counts()
        return loss

    def push(self) -> None:
        """Pass the groups' learning rates and loaded step counts to the kernels, at the latest for the next lookup.

        Raises:
            ConfigError: if another setting was changed, which kernels have from the beginning.
        """
        self._check_settings(self.param_groups)
        for spec, group in zip(self._specs, self.param_groups, strict=True):
            for collection in self._collections:
                collection.set_learning_rate(spec, float(group["lr"]))
        self._take_steps()

    def _check_settings(self, groups: Iterable[Mapping[str, Any]]) -> None:
        for spec, tables, group in zip(self._specs, self._tables, groups, strict=True):
            for name in ("eps", "weight_decay", "betas"):
                own, value = getattr(spec, name), group.get(name)
                if value is not None and value != own and (name != "betas" or tuple(value) != own):
                    raise ConfigError(
                        f"{name} of the fused optimizer of {', '.join(tables)} is {own} in its kernels and {value} in "
                        f"its group. Only lr can change after shardrec.shard: give the tables an optimizer with "
                        f"{name}={value} before it"
                    )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no step has applied."""
        for collection in self._collections:
            collection.drop_gradients()

    def _row_gradients(self) -> list[Tensor]:
        deferred = [part for collection in self._collections for part in collection.shards.deferred()]
        return [values for part in deferred for values in part.tensors()]

    def save_param_groups(self, save: bool) -> None:
        """Whether states have the groups' settings, and loading sets them; they do until this says otherwise."""
        super().save_param_groups(save)
        self._saves_groups = save

    def state_dict(self) -> dict[str, Any]:
        """This rank's states by parameter name, and the groups' settings with the names."""
        self._refresh()
        names = {parameter: name for name, parameter in self.params.items()}
        state = {name: self.state[parameter] for name, parameter in self.params.items() if parameter in self.state}
        if not self._saves_groups:
            return {"state": state}
        groups = [
            {**group, "params": [names[parameter] for parameter in group["params"] if parameter in names]}
            for group in self.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy states into the kernels and set the groups' settings, if ``state_dict`` has them.

        Raises:
            ConfigError: if the groups, their settings except learning rates, or the shapes are not those of this rank's
                shards.
        """
        groups = state_dict.get("param_groups") if self._saves_groups else None
        if groups is None:
            groups = self.param_groups
        mine = [sum(parameter in self._table_of for parameter in group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in groups]
        if groups is not self.param_groups and mine != theirs:
            raise ConfigError(
                f"the state_dict has groups of {theirs} shards and this rank's optimizer groups of {mine}; load it "
                "under the plan it was saved under, or use shardrec.load_checkpoint"
            )
        self._check_settings(groups)
        grouped = {parameter for group in self.param_groups for parameter in group["params"]}
        self._show_counts()  # those that differ are taken
        for name, parameter in self.params.items():
            saved = state_dict["state"].get(name, {})
            if parameter in grouped:
                self._load_one(parameter, saved)
            else:
                self.state[parameter] = saved  # of a wrapper, such as WarmupOptimizer
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "tables")})
        self._refresh()
        self.push()

    def post_load_state_dict(self) -> None:
        """Apply what TorchRec's optimizers have copied into :attr:`state` and the groups."""
        self.push()

    def settings(self) -> dict[str, Any]:
        """The groups' settings, such as learning rates, and the states of wrappers, such as WarmupOptimizer's."""
        grouped = {parameter for group in self.param_groups for parameter in group["params"]}
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        others = {name: self.state[other] for name, other in self.params.items() if other not in grouped}
        return {"param_groups": groups, "state": others}

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Take the settings of the optimizer of a model with the same tables."""
        for group, source in zip(self.param_groups, settings["param_groups"], strict=True):
            group.update(source)
        for name, state in settings["state"].items():
            if name in self.params:
                self.state[self.params[name]] = state
        self._refresh()
        self.push()

    def _take_steps(self) -> None:
        """Pass step counts that were written into :attr:`state`, for example by a checkpoint, to the kernels."""
        changed: dict[str, int] = {}
        for parameter, shown in self._shown.items():
            count = int(self.state[parameter]["step"])
            if count != shown:
                self._shown[parameter] = changed[self._table_of[parameter]] = count
        # Tables that share a kernel share their largest count: those of other ranks have none here.
        elsewhere = {name for group in self.param_groups for name in group["tables"]} - set(self._table_of.values())
        for collection in self._collections if changed else ():
            counts = collection.step_counts()
            if changed.keys() & counts.keys():
                collection.load_step_counts(counts | dict.fromkeys(elsewhere & counts.keys(), 0) | changed)

    def _load_one(self, parameter: nn.Parameter, saved: dict[str, Any]) -> None:
        state = self.state[parameter]
        if set(state) != set(saved):
            raise ConfigError(
                f"the saved states of a shard are {sorted(saved)} and this optimizer's {sorted(state)}; load the state "
                "of the same optimizer"
            )
        for key, value in saved.items():
            if value.shape != state[key].shape:
                raise ConfigError(
                    f"the saved {key} has shape {tuple(value.shape)} and the shard's {tuple(state[key].shape)}; load "
                    "it under the plan it was saved under, or use shardrec.load_checkpoint"
                )
            state[key].copy_(value)

    def _refresh(self) -> None:
        """Point ``state`` at the kernels' memory, and count Adam's steps."""
        self._take_steps()
        for collection in self._collections:
            for name, optimizer in collection.fused_optimizers().items():
                table = collection.tables()[name]
                parts = {state: collection.fused_state(name, state) for state in optimizer.states}
                for shard, parameter in table.locals.items():
                    self._table_of[parameter] = table.layout.name
                    if optimizer.counts_steps:
                        self._shown[parameter] = -1
                    self.state[parameter] = {state: tensors[shard] for state, tensors in parts.items()}
        self._show_counts()

    def _show_counts(self) -> None:
        """Write the kernels' counts of updates into ``state``."""
        if not self._shown:
            return
        counts: dict[str, int] = {}
        for collection in self._collections:
            counts |= collection.step_counts()
        for parameter, shown in self._shown.items():
            count = counts[self._table_of[parameter]]
            if count != shown:
                self._shown[parameter] = count
                self.state[parameter]["step"] = torch.tensor(float(count), dtype=torch.float32)


def _settings(spec: FusedOptimizer) -> dict[str, Any]:
    settings: dict[str, Any] = {"optimizer": spec.kind.value, "lr": spec.lr}
    if spec.eps:
        settings["eps"] = spec.eps
    if spec.weight_decay:
        settings["weight_decay"] = spec.weight_decay
    if spec.betas != (0.0, 0.0):
        settings["betas"] = spec.betas
    return settings
