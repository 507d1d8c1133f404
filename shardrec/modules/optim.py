"""The fused optimizers of a sharded model as one torch optimizer: learning rates to schedule, states to save.

With ``update="backward"`` the weights are updated inside backward, so ``step()`` has nothing to do, and the rate that a
scheduler writes into ``param_groups[i]["lr"]`` reaches the kernels at the next lookup. With ``update="step"``,
``step()`` updates them, by the learning rates of that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

from shardrec.errors import ConfigError
from shardrec.exchange.backward_watch import weak_hook
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.grad_scaler import TableGradients
from shardrec.modules.table import as_one_tensor, copy_rows, local_parts
from shardrec.step.context import ModelContext


class NoFusedOptimizer(ConfigError, AttributeError):
    """The model lacks fused optimizers. It is an AttributeError, so that ``hasattr`` returns False."""


class FusedOptimizers(KeyedOptimizer):  # type: ignore[misc]  # torchrec has no types
    """A view of the optimizers that update the tables of this rank.

    It is a ``KeyedOptimizer``, so TorchRec's ``CombinedOptimizer`` and ``WarmupOptimizer`` accept it.

    ``param_groups`` has one group for each distinct optimizer setting (class, learning rate, betas, ...), the same on
    every rank; its ``params`` are this rank's shards, possibly none, and ``tables`` the names of all its tables.
    ``params`` has this rank's shards by name. A table's first shard, or an empty parameter on ranks without any, has
    the table's name, and in ``state`` the table's states by TorchRec's names: ``t.momentum1`` is the first one, such as
    Adagrad's ``sum`` and Adam's ``exp_avg``, ``t.exp_avg_sq`` Adam's second. ``t.step`` is shardrec's. The states are
    views of the kernels' memory: on several ranks ShardedTensors of the table's shape, or of (rows,) if rowwise, which
    ``torch.distributed.checkpoint`` saves and loads under any plan.

    With ``update="step"`` the first group has a placeholder behind its shards, for ``torch.amp.GradScaler``.

    Args:
        collections: the sharded collections of a model.
        names: of their tables in the model, by id.
        context: of the model.

    Raises:
        NoFusedOptimizer: if no table has a fused optimizer. A ConfigError and an AttributeError.
    """

    @torch.inference_mode(False)  # an inference tensor could not be written later
    def __init__(
        self, collections: Iterable[ShardedCollection], names: Mapping[int, str], context: ModelContext
    ) -> None:
        self._collections = list(collections)
        by_spec = _groups_by_spec(self._collections)
        if not by_spec:
            raise NoFusedOptimizer(
                "no table of this model has a fused optimizer. Give the tables one with apply_optimizer_in_backward "
                "before sharding, or use an ordinary optimizer over model.parameters()"
            )
        self._specs, groups = list(by_spec), list(by_spec.values())
        # KeyedOptimizer's own takes states and groups that are there already, and lacks add_param_group.
        torch.optim.Optimizer.__init__(self, groups, {})
        self.defaults["_save_param_groups"] = False  # CombinedOptimizer asks for one value of all its optimizers
        self._saves_groups = True
        self._held: dict[nn.Parameter, tuple[ShardedCollection, str]] = {}  # by its first shard, a table
        self._shown: dict[nn.Parameter, int] = {}  # counts of updates, as they were written into the states
        self._stand_ins: dict[str, nn.Parameter] = {}  # of wrappers that have not come yet
        self._rates: list[float] = []  # before they came
        self._shards = self._name_shards(names)
        self.params = dict(self._shards)
        self._at_step = context.options.updates_at_step
        if self._at_step:
            placeholder = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=context.device))
            placeholder.grad = self._gradients = TableGradients.of(self._row_gradients, context.device)
            self.param_groups[0]["params"].append(placeholder)
        self._refresh()
        context.life_cycle.look_up_begins.append(weak_hook(self.push))

    add_param_group = torch.optim.Optimizer.add_param_group

    def _name_shards(self, names: Mapping[int, str]) -> dict[str, nn.Parameter]:
        """This rank's shards by name, with a stand-in for each table that has none here."""
        shards: dict[str, nn.Parameter] = {}
        self._held.clear()
        for collection in self._collections:
            for name in collection.fused_optimizers():
                table = collection.tables()[name]
                path = names[id(table)]
                first = next(iter(table.locals.values()), None)
                if first is None and collection.storage.before_rows is None:  # servers keep the states of their shards
                    first = nn.Parameter(torch.empty(0, dtype=torch.float32, device=collection.device))
                if first is not None:
                    shards[f"{path}.weight"] = first
                    self._held[first] = collection, name
                shards.update((f"{path}.{own}", shard) for own, shard, *_ in table.kept[1:])
        return shards

    def follow(self, names: Mapping[int, str]) -> None:
        """Have the shards of another plan, by the names of the model's tables. Settings stay."""
        before, by_spec = set(self._shards.values()), _groups_by_spec(self._collections)
        for spec, group in zip(self._specs, self.param_groups, strict=True):
            group["params"][:] = by_spec[spec]["params"] + [
                parameter for parameter in group["params"] if parameter not in before
            ]
        others = {name: parameter for name, parameter in self.params.items() if parameter not in before}
        self._shards = self._name_shards(names)
        self.params.clear()  # in place: wrappers have it, such as WarmupOptimizer
        self.params.update(others | self._shards)
        for parameter in before:
            self.state.pop(parameter, None)
        self._shown.clear()
        self._refresh()
        self.push()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the tables with the gradients of all backward calls since the last step. Every rank calls it.

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
        if self._stand_ins:
            self.wrappers()
        self._check_settings(self.param_groups)
        for spec, group in zip(self._specs, self.param_groups, strict=True):
            for collection in self._collections:
                collection.set_learning_rate(spec, float(group["lr"]))
        self._take_steps()

    def _check_settings(self, groups: Iterable[Mapping[str, Any]]) -> None:
        for spec, group in zip(self._specs, groups, strict=True):
            for name in ("eps", "weight_decay", "betas"):
                fixed, value = getattr(spec, name), group.get(name)
                if value is not None and value != fixed and (name != "betas" or tuple(value) != fixed):
                    raise ConfigError(
                        f"{name} of the fused optimizer of {', '.join(group['tables'])} is {fixed} in its kernels and "
                        f"{value} in its group. Only lr can change after shardrec.shard: give the tables one with "
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
        """Whether states have the groups' settings, and loading sets them. They do until this says otherwise."""
        super().save_param_groups(save)
        self._saves_groups = save

    def state_dict(self) -> dict[str, Any]:
        """Each table's states by the name of its weight, as views of the kernels' memory, and the groups' settings."""
        self._refresh()
        state = {name: self.state[parameter] for name, parameter in self.params.items() if parameter in self.state}
        if not self._saves_groups:
            return {"state": state}
        names = {self._plan_name(held): name for name, held in self._shards.items() if held in self._held}
        # A tuple, whose key torch.distributed.checkpoint does not change on ranks that have no shard of a table.
        groups = tuple(
            {**group, "params": [names[table] for table in group["tables"] if table in names]}
            for group in self.param_groups
        )
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy states into the kernels and set the groups' settings, if ``state_dict`` has them.

        Args:
            state_dict: of this optimizer under the same plan, as ``torch.distributed.checkpoint`` loads it under any;
                of TorchRec's, which has no ``step``; or of whole tensors in place of ShardedTensors.

        Raises:
            ConfigError: if tables, states, shapes, shards, or settings other than rates differ from this optimizer's.
        """
        groups = state_dict.get("param_groups") if self._saves_groups else None
        if groups is None:
            groups = self.param_groups
        mine, theirs = ([group.get("tables") for group in each] for each in (self.param_groups, groups))
        if mine != theirs:
            raise ConfigError(
                f"the state_dict has groups of the tables {theirs} and this optimizer of {mine}. Load the state of an "
                "optimizer whose tables have the same settings"
            )
        self._check_settings(groups)
        self.wrappers()
        self._show_counts()  # those that differ are taken
        for name, parameter in self.params.items():
            saved = state_dict["state"].get(name, {})
            if parameter in self._held:
                self._load_one(name, parameter, saved)
            elif name not in self._shards:
                self._set_state(parameter, saved)
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "tables")})
        self._take_rows()
        self._refresh()
        self.push()

    def post_load_state_dict(self) -> None:
        """Apply what TorchRec's optimizers have copied into :attr:`state` and the groups."""
        self._take_rows()
        self.push()

    def wrappers(self, later: Iterable[str] = ()) -> dict[str, nn.Parameter]:
        """The parameters under which wrappers such as WarmupOptimizer keep states in :attr:`state`, by name. ``later``
        names wrappers that may come later. They then have the states that their stand-ins were given."""
        for name, stand_in in [*self._stand_ins.items()]:
            if self.params[name] is not stand_in:  # the wrapper has come, and has set the rates of its first step
                del self._stand_ins[name]
                if stand_in in self.state:
                    self.state[self.params[name]] = self.state.pop(stand_in)
                    for group, rate in zip(self.param_groups, self._rates, strict=True):
                        group["lr"] = rate
        for name in set(later) - self.params.keys():
            self.params[name] = self._stand_ins[name] = nn.Parameter(torch.empty(0, dtype=torch.float32))
        self._rates = [group["lr"] for group in self.param_groups]
        return {name: parameter for name, parameter in self.params.items() if name not in self._shards}

    def settings(self) -> dict[str, Any]:
        """The groups' settings, such as learning rates, and the states of wrappers."""
        wrappers = self.wrappers()
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        states = {name: self.state[parameter] for name, parameter in wrappers.items() if parameter in self.state}
        return {"param_groups": groups, "state": states}

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Take the settings of the optimizer of a model with the same tables."""
        for group, source in zip(self.param_groups, settings["param_groups"], strict=True):
            group.update(source)
        for name, parameter in self.wrappers(settings["state"]).items():
            self._set_state(parameter, settings["state"].get(name))
        self._refresh()
        self.push()

    def _set_state(self, parameter: nn.Parameter, state: dict[str, Any] | None) -> None:
        """Of a wrapper, for which an empty state is not the same as none."""
        self.state.pop(parameter, None)
        if state:
            self.state[parameter] = state

    def _take_steps(self) -> None:
        """Pass step counts that were written into :attr:`state`, for example by a checkpoint, to the kernels."""
        changed: dict[str, int] = {}
        for parameter, shown in self._shown.items():
            count = int(self.state[parameter][self._step_name(parameter)])
            if count != shown:
                self._shown[parameter] = changed[self._plan_name(parameter)] = count
        # Tables that share a kernel share their largest count. Tables of other ranks are not counted here.
        elsewhere = {name for group in self.param_groups for name in group["tables"]}
        elsewhere -= set(map(self._plan_name, self._shown))
        for collection in self._collections if changed else ():
            counts = collection.step_counts()
            if changed.keys() & counts.keys():
                collection.load_step_counts(counts | dict.fromkeys(elsewhere & counts.keys(), 0) | changed)

    def _plan_name(self, parameter: nn.Parameter) -> str:
        collection, name = self._held[parameter]
        return collection.tables()[name].layout.name

    def _step_name(self, parameter: nn.Parameter) -> str:
        return f"{self._held[parameter][1]}.step"

    def _load_one(self, name: str, parameter: nn.Parameter, saved: dict[str, Any]) -> None:
        state, step = self.state[parameter], self._step_name(parameter)
        if set(state) - {step} != set(saved) - {step}:
            raise ConfigError(
                f"the saved states of {name} are {sorted(saved)} and this optimizer's {sorted(state)}. Load the state "
                "of the same optimizer"
            )
        for key, value in saved.items():
            parts, given = local_parts(state[key]), local_parts(value)
            if value.size() != state[key].size() or (isinstance(value, ShardedTensor) and parts.keys() != given.keys()):
                raise ConfigError(
                    f"the saved {key} has shape {tuple(value.size())}, here {sorted(given)}, and this optimizer's "
                    f"{tuple(state[key].size())}, here {sorted(parts)}. Load it under the plan it was saved under, or "
                    "by torch.distributed.checkpoint or shardrec.load_checkpoint, which cut it anew"
                )
            for place, tensor in parts.items():
                tensor.copy_(given[place] if place in given else value[tuple(map(slice, *place))])

    def _take_rows(self) -> None:
        """Have a rank's column stripes the states of rows alike, of which :attr:`state` shows those of one stripe."""
        for parameter, (collection, name) in self._held.items():
            optimizer, tensors = collection.fused_optimizers()[name], self.state[parameter]
            for key, state in zip(tensors, optimizer.states, strict=False):  # the step is the last
                if state in optimizer.row_states and len(collection.tables()[name].locals) > 1:
                    for shard, rows in collection.fused_state(name, state).items():
                        copy_rows(rows, shard, tensors[key])

    @torch.inference_mode(False)  # an inference tensor could not be written later
    def _refresh(self) -> None:
        """Point ``state`` at the kernels' memory, and count Adam's steps."""
        self._take_steps()
        for parameter, (collection, name) in self._held.items():
            optimizer, table = collection.fused_optimizers()[name], collection.tables()[name]
            ranks = 1 if table.group is None else dist.get_world_size(table.group)
            if not table.layout.replicated and collection.context.collectives.world_size != ranks:
                continue  # on a server, whose tables no group of its own holds whole
            if optimizer.counts_steps and table.locals:
                self._shown[parameter] = -1
            self.state[parameter] = {
                # TorchRec calls the first one momentum1, whatever it is.
                f"{name}.{state if number else 'momentum1'}": as_one_tensor(
                    table.layout,
                    collection.fused_state(name, state),
                    table.group,
                    per_row=state in optimizer.row_states,
                )
                for number, state in enumerate(optimizer.states)
            }
        self._show_counts()

    @torch.inference_mode(False)  # an inference tensor could not be written later
    def _show_counts(self) -> None:
        """Write the kernels' counts of updates into ``state``."""
        if not self._shown:
            return
        counts: dict[str, int] = {}
        for collection in self._collections:
            counts |= collection.step_counts()
        for parameter, shown in self._shown.items():
            count = counts[self._plan_name(parameter)]
            if count != shown:
                self._shown[parameter] = count
                self.state[parameter][self._step_name(parameter)] = torch.tensor(float(count), dtype=torch.float32)


def _groups_by_spec(collections: Iterable[ShardedCollection]) -> dict[FusedOptimizer, dict[str, Any]]:
    """Per distinct optimizer of tables, its parameter group: this rank's shards, the names of all its tables, and the
    settings that the tables were given."""
    groups: dict[FusedOptimizer, dict[str, Any]] = {}
    for collection in collections:
        for name, spec in collection.fused_optimizers().items():
            group = groups.setdefault(spec, {"params": [], "tables": [], "optimizer": spec.kind.value, "lr": spec.lr})
            given = {"eps": spec.eps, "weight_decay": spec.weight_decay, "betas": any(spec.betas) and spec.betas}
            group.update({setting: value for setting, value in given.items() if value})
            group["tables"].append(collection.tables()[name].layout.name)
            group["params"] += collection.tables()[name].locals.values()
    return groups
