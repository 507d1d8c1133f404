"""What ``shardrec doctor`` tries on a device: small steps by the real code, compared with the unsharded module's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec import ConfigError, ShardedModel, ShardingPlan, Topology, VersionError
from shardrec.launch import check_exchange
from shardrec.layout import cuts, table_shapes

_ROWS, _DIM, _STEPS = 50, 8, 3


def fbgemm_build(device: torch.device) -> str:
    """Whether the fbgemm-gpu that is loaded has kernels for the device.

    Raises:
        VersionError: if it is the CPU's, or was built without this GPU's architecture.
    """
    has_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::permute_2D_sparse_data", "CUDA")
    if device.type != "cuda":
        return f"fbgemm-gpu has kernels for the CPU{' and for CUDA' if has_cuda else ''}"
    if not has_cuda:
        raise VersionError(
            "the fbgemm-gpu that is installed is the build for the CPU, which lacks CUDA kernels: uninstall "
            "fbgemm-gpu-cpu and install fbgemm-gpu of the same version (make train DEVICE=gpu does so)"
        )
    try:
        torch.ops.fbgemm.asynchronous_complete_cumsum(torch.ones(3, dtype=torch.int64, device=device)).tolist()
    except RuntimeError as error:
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise VersionError(
            f"fbgemm-gpu has CUDA kernels, and none that {name} (compute capability {capability[0]}.{capability[1]}) "
            f"runs ({str(error).splitlines()[0]}): install a build of fbgemm-gpu for it"
        ) from error
    return "fbgemm-gpu has kernels that run on this GPU"


def collectives(device: torch.device) -> str:
    """A header, a payload and pooled rows of one rank to itself, over NCCL (gloo on the CPU), by the exchange's code.

    Raises:
        ConfigError: if something else comes than was sent.
    """
    with _group_of_one(device) as group:
        faults = check_exchange(group, device)
    name = "NCCL" if device.type == "cuda" else "gloo"
    if faults:
        raise ConfigError(f"of an exchange over {name}, {', '.join(faults)} came back changed")
    return f"header, payload and output were exchanged over {name} by one rank"


def training_lookup(device: torch.device) -> str:
    """Some steps of a sharded collection, and of the unsharded one on the CPU.

    Raises:
        ConfigError: if outputs or weights differ.
    """
    model, reference = _sharded(device), _collection()
    fused = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(_STEPS):
        values, expected = model(_features(step, device)).values(), reference(_features(step)).values()
        _compare("outputs", values.detach().cpu(), expected.detach())
        values.square().sum().backward()
        expected.square().sum().backward()
        fused.step()
        fused.zero_grad()
    weights = dict(model.named_parameters())
    for name, weight in reference.named_parameters():
        _compare(f"weights {name!r}", weights[name].detach().cpu(), weight.detach())
    return f"{_STEPS} training steps of a sharded collection gave the unsharded one's outputs and weights"


def scripted_lookup(device: torch.device) -> str:
    """The same model as TorchScript.

    Raises:
        ConfigError: if its outputs are not the eager model's.
    """
    model = _sharded(device).eval()
    scripted = shardrec.script(model, portable=True)
    with torch.no_grad():
        features = _features(0, device)
        _compare("scripted outputs", scripted(features).values().cpu(), model(features).values().cpu())
    return "a scripted collection gave the eager one's outputs"


def _collection() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(name=f"t{number}", num_embeddings=_ROWS, embedding_dim=_DIM, feature_names=[feature])
        for number, feature in enumerate("ab")
    ]
    return EmbeddingBagCollection(tables=configs)


def _sharded(device: torch.device) -> ShardedModel:
    module = _collection()
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    # Not the planner's, because its extra may not be installed.
    tables = tuple(cuts.table_wise(name, *shape, rank=0) for name, shape in table_shapes(module).items())
    return shardrec.shard(module, ShardingPlan(topology=Topology(), tables=tables), device=device)


def _features(step: int, device: torch.device | str = "cpu") -> KeyedJaggedTensor:
    draws = torch.Generator().manual_seed(step)
    lengths = torch.randint(3, (8,), generator=draws, dtype=torch.int32)
    values = torch.randint(_ROWS, (int(lengths.sum()),), generator=draws)
    return KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=lengths).to(torch.device(device))


def _compare(what: str, actual: Tensor, expected: Tensor) -> None:
    if actual.shape != expected.shape:
        raise ConfigError(f"{what} on the device have shape {tuple(actual.shape)}, on the CPU {tuple(expected.shape)}")
    if not torch.allclose(actual, expected, atol=1e-4):
        most = float((actual - expected).abs().max())
        raise ConfigError(f"{what} on the device are not those on the CPU. The largest difference is {most:.3g}")


@contextmanager
def _group_of_one(device: torch.device) -> Iterator[dist.ProcessGroup]:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None, "it was made above"
        yield group
    finally:
        dist.destroy_process_group()
