"""Balances the layers of stages, by the bytes of their parameters or by measured time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardrec.errors import ConfigError
from shardrec.pipeline.skip import SkipTracker, use_skip_tracker


def partition(costs: Sequence[float], stages: int) -> list[int]:
    """Cut a sequence into runs so that the cost of the most costly run is minimal.

    Args:
        costs: per layer, at least 0.
        stages: number of runs S, none of them empty.

    Returns:
        S numbers of layers.

    Raises:
        ConfigError: if there are fewer layers than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ConfigError(f"{len(costs)} layers cannot be cut into {stages} stages: take 1 to {len(costs)}")
    sums = list(accumulate(costs, initial=0.0))
    # best[n]: the first n layers cut into as many runs as so far: what the most costly run costs, and the counts.
    best = {end: (sums[end], [end]) for end in range(1, len(sums))}
    for runs in range(2, stages + 1):
        before, best = best, {}
        for end in range(runs, len(sums)):
            start = min(range(runs - 1, end), key=lambda start: max(before[start][0], sums[end] - sums[start]))
            best[end] = max(before[start][0], sums[end] - sums[start]), [*before[start][1], end - start]
    return best[len(costs)][1]


def balance_by_size(stages: int, module: nn.Sequential) -> list[int]:
    """Number of layers per stage so that the largest stage has the fewest bytes of parameters and buffers.

    Args:
        stages: number of stages.
        module: the sequential. It may be on meta.

    Raises:
        ConfigError: if there are fewer layers than stages.
    """
    sizes = [sum(tensor.nbytes for tensor in [*layer.parameters(), *layer.buffers()]) for layer in _layers(module)]
    return partition(sizes, stages)


def balance_by_time(stages: int, module: nn.Sequential, sample: object, *, repeats: int = 5) -> list[int]:
    """Number of layers per stage so that the slowest stage takes least time, forward and backward.

    Layers are timed one after the other on their devices, in training mode. Modes, gradients, statistics and random
    state are restored.

    Args:
        stages: number of stages.
        module: the sequential.
        sample: an input. Use the size of a micro-batch for accurate times.
        repeats: times that each layer runs. The fastest counts.

    Raises:
        ConfigError: if there are fewer layers than stages.
    """
    return partition(layer_seconds(module, sample, repeats=repeats), stages)


def layer_seconds(module: nn.Sequential, sample: object, *, repeats: int = 5) -> list[float]:
    """Seconds of each layer's forward and backward on ``sample``, in training mode."""
    layers = _layers(module)
    parameters = list(module.parameters())
    gradients = [parameter.grad for parameter in parameters]
    state = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    modes = {submodule: submodule.training for submodule in module.modules()}
    seconds = [float("inf")] * len(layers)
    devices = sorted({parameter.device.index for parameter in parameters if parameter.device.type == "cuda"})
    try:
        module.train()
        module.zero_grad()  # backward would add to the gradients in place
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            for _ in range(repeats):
                with use_skip_tracker(SkipTracker()):
                    value: object = sample
                    for number, layer in enumerate(layers):
                        value = tree_map(_leaf, value)
                        begin = _now(devices)
                        value = layer(value)
                        roots = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
                        if roots:
                            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots], retain_graph=True)
                        seconds[number] = min(seconds[number], _now(devices) - begin)
    finally:
        for submodule, training in modes.items():
            submodule.training = training
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        module.load_state_dict(state, strict=False)
    return seconds


def _now(devices: Sequence[int]) -> float:
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _leaf(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    # Not the leaf itself, which a layer could not change in place.
    return value.detach().requires_grad_(value.is_floating_point()).clone()


def _layers(module: nn.Sequential) -> list[nn.Module]:
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"a pipeline is cut out of an nn.Sequential, and not of a {type(module).__name__}")
    return list(module)


def check_balance(module: nn.Sequential, balance: Sequence[int]) -> list[int]:
    """The balance, if it fits the module.

    Raises:
        TypeError: if the module is not a sequential.
        ConfigError: if numbers are not positive or do not add up, or stages would share a parameter or a buffer.
    """
    layers = _layers(module)
    balance = list(balance)
    if not balance or any(count < 1 for count in balance):
        raise ConfigError(f"balance is {balance}: every stage needs at least one layer")
    if sum(balance) != len(layers):
        raise ConfigError(
            f"balance is {balance}, which is {sum(balance)} layers, and the sequential has {len(layers)}: make them "
            "equal, for example by balance_by_size"
        )
    owner: dict[Tensor, tuple[int, str]] = {}
    faults = []
    stage_of = [stage for stage, count in enumerate(balance) for _ in range(count)]
    for stage, name, layer in zip(stage_of, module._modules, layers, strict=True):
        for path, tensor in chain(layer.named_parameters(name), layer.named_buffers(name)):
            first, first_path = owner.setdefault(tensor, (stage, path))
            if first != stage:
                faults.append(f"{first_path} (stage {first}) is {path} (stage {stage})")
    if faults:
        raise ConfigError(
            f"stages share parameters or buffers, and each stage would change its own copy: {'; '.join(faults)}. Put "
            "the layers into one stage, or give each its own"
        )
    return balance
