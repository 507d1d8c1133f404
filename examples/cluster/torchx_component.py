"""A TorchX component: ``torchx run -s SCHEDULER torchx_component.py:train --config /shared/run.yaml``.

TorchX reads the arguments' types at run time, and so there is no ``from __future__ import annotations``.
"""

from torchx import specs
from torchx.components import dist

__all__ = ["train"]


def train(
    config: str,
    image: str = "shardrec:0.1.0",
    j: str = "1:4x8",
    gpu: int = 8,
    cpu: int = 64,
    memMB: int = 256_000,
    max_retries: int = 3,
    shared: str = "/shared",
) -> specs.AppDef:
    """``shardrec train`` on the ranks of torchrun.

    Args:
        config: YAML file of the run, as the hosts see it.
        image: made by the Containerfile.
        j: least and most hosts, and ranks on each, such as 1:4x8.
        gpu: GPUs of a host.
        cpu: processors of a host.
        memMB: memory of a host.
        max_retries: times that the scheduler starts a host's agent again.
        shared: folder of the run that all hosts see under this name.
    """
    return dist.ddp(
        *("train", config, "--resume"),
        m="shardrec.trainer.cli",
        name="shardrec",
        image=image,
        j=j,
        gpu=gpu,
        cpu=cpu,
        memMB=memMB,
        max_retries=max_retries,
        mounts=["type=bind", f"src={shared}", f"dst={shared}"],
    )
