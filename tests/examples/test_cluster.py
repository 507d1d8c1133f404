"""The files for clusters, as their readers take them, and a run on hosts that are network namespaces."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from examples.cluster.main import RANKS_PER_HOST, main, why_not
from shardrec.trainer.run.config import load_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
TRAIN = ["-m", "shardrec.trainer.cli", "train", "/shared/run.yaml", "--resume"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestHosts:
    """Two hosts with two ranks each."""

    def test_the_run_goes_on_without_the_host_that_is_lost(self, tmp_path: Path) -> None:
        reason = why_not()
        if reason:
            pytest.skip(reason)
        final = main(tmp_path / "lost")
        log = (tmp_path / "lost" / "host0.log").read_text(encoding="utf-8")
        assert "training dlrm on 4 ranks" in log
        assert re.search(r"rank [01] of 4 waited .*for rank 2; rank 3", log)
        assert re.search(r"training dlrm on 2 ranks .*\ncontinuing from the checkpoint of step \d+", log)
        results = json.loads((tmp_path / "lost" / "run" / "metrics.json").read_text(encoding="utf-8"))
        assert results["curve"][-1]["samples"] == 157 * 256, "each of the rows asked for, to whole batches"
        assert final["auc"] > 0.6
        assert list((tmp_path / "lost" / "model").glob("version-*.json"))

    def test_two_hosts_train_over_a_slow_link(self, tmp_path: Path) -> None:
        reason = why_not(slow=True)
        if reason:
            pytest.skip(reason)
        assert main(tmp_path / "slow", loses_host=False, slow=True)["auc"] > 0.6
        plan = json.loads((tmp_path / "slow" / "run" / "plan.json").read_text(encoding="utf-8"))
        assert plan["topology"]["hosts"] == 2
        assert plan["topology"]["ranks_per_host"] == RANKS_PER_HOST


def command_of(script: str, folder: Path, **environment: str) -> list[str]:
    """What a script gives torchrun, itself or by srun."""
    echoes = 'printf "%s\\n" "$@"'
    for name, prints in (
        ("torchrun", f'test "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" = 1 && {echoes}'),
        ("srun", f'test "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" = 1 && {echoes}'),
        ("scontrol", "echo n0; echo n1"),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{prints}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(FOLDER / script), "/shared/run.yaml"],
        env={"PATH": f"{folder}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    return words[words.index("torchrun") + 1 :] if "torchrun" in words else words


def agent_of(command: list[str]) -> argparse.Namespace:
    """A command as torchrun reads it."""
    from torch.distributed.run import parse_args  # seconds, which the other tests need not wait for

    options = parse_args(command)
    assert options.module
    assert ["-m", options.training_script, *options.training_script_args] == TRAIN
    assert options.rdzv_backend == "c10d"
    assert options.max_restarts == 3
    return options


class TestScripts:
    """By hand and Slurm."""

    def test_torchrun(self, tmp_path: Path) -> None:
        options = agent_of(command_of("torchrun.sh", tmp_path, HEAD="host0", RANKS_PER_HOST="8"))
        assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("1:4", "8", "host0:29400")

    def test_the_head_has_to_be_named(self) -> None:
        done = subprocess.run(["bash", str(FOLDER / "torchrun.sh")], env={}, capture_output=True, text=True)
        assert done.returncode != 0
        assert "HEAD: name the host" in done.stderr

    def test_slurm(self, tmp_path: Path) -> None:
        job = {
            "SLURM_JOB_NODELIST": "n[0-1]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_JOB_ID": "7",
        }
        options = agent_of(command_of("slurm.sbatch", tmp_path, **job))
        assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("1:2", "8", "n0:29400")
        assert options.rdzv_id == "7"

    def test_directives(self) -> None:
        values = {
            "job-name": r"\w+",
            "nodes": r"\d+",
            "ntasks-per-node": "1",  # a task is an agent
            "gpus-per-node": r"\d+",
            "cpus-per-task": r"\d+",
            "time": r"\d\d:\d\d:\d\d",
            "signal": r"B:TERM@\d+",  # B: to the script, which traps it
            "no-kill": None,
            "requeue": None,
        }
        shebang, *lines = (FOLDER / "slurm.sbatch").read_text(encoding="utf-8").splitlines()
        assert shebang == "#!/usr/bin/env bash"
        directives = [line for line in lines if line.startswith("#SBATCH")]
        names = {}
        for line in directives:
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            assert re.fullmatch(values[name] or "", value), line
            names[name] = value
        assert names.keys() == values.keys()
        commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
        assert lines.index(directives[-1]) < commands[0], "sbatch ignores directives after the first command"


class Strict(BaseModel):
    """Fields of Kubernetes or of the training operator, which refuse others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SecretReference(Strict):
    name: str


class EnvironmentSource(Strict):
    secretRef: SecretReference


class Resources(Strict):
    limits: dict[str, int | str]


class VolumeMount(Strict):
    name: str
    mountPath: Annotated[str, Field(pattern="^/")]


class Container(Strict):
    name: Literal["pytorch"]  # the operator refuses a job without a container of this name
    image: str
    command: list[str]
    envFrom: list[EnvironmentSource]
    resources: Resources
    volumeMounts: list[VolumeMount]


class Claim(Strict):
    claimName: str


class EmptyFolder(Strict):
    medium: Literal["", "Memory"]
    sizeLimit: Annotated[str, Field(pattern=r"^\d+(Ki|Mi|Gi)$")]


class Volume(Strict):
    name: str
    persistentVolumeClaim: Claim | None = None
    emptyDir: EmptyFolder | None = None


class PodSecurity(Strict):
    fsGroup: int


class PodSpec(Strict):
    securityContext: PodSecurity
    terminationGracePeriodSeconds: int
    containers: Annotated[list[Container], Field(min_length=1, max_length=1)]
    volumes: list[Volume]


class PodTemplate(Strict):
    spec: PodSpec


class ReplicaSpec(Strict):
    replicas: Annotated[int, Field(ge=1)]
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"]
    template: PodTemplate


class Replicas(Strict):
    Worker: ReplicaSpec  # an elastic job has no Master


class ElasticPolicy(Strict):
    rdzvBackend: Literal["c10d", "etcd", "etcd-v2"]
    rdzvId: str
    minReplicas: Annotated[int, Field(ge=1)]
    maxReplicas: int
    maxRestarts: Annotated[int, Field(ge=0)]


class RunPolicy(Strict):
    cleanPodPolicy: Literal["All", "Running", "None"]


class JobSpec(Strict):
    nprocPerNode: Annotated[str, Field(pattern=r"^(auto|cpu|gpu|\d+)$")]
    elasticPolicy: ElasticPolicy
    runPolicy: RunPolicy
    pytorchReplicaSpecs: Replicas


class Metadata(Strict):
    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")]  # a DNS-1035 label


class PyTorchJob(Strict):
    apiVersion: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: Metadata
    spec: JobSpec


def test_the_kubernetes_job() -> None:
    job = PyTorchJob.model_validate(yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text(encoding="utf-8")))
    policy, worker = job.spec.elasticPolicy, job.spec.pytorchReplicaSpecs.Worker
    assert policy.minReplicas <= worker.replicas <= policy.maxReplicas
    pod = worker.template.spec
    assert pod.containers[0].command == ["torchrun", *TRAIN]
    assert pod.containers[0].resources.limits["nvidia.com/gpu"] == int(job.spec.nprocPerNode)
    assert {mount.name for mount in pod.containers[0].volumeMounts} == {volume.name for volume in pod.volumes}
    assert all((volume.emptyDir is None) != (volume.persistentVolumeClaim is None) for volume in pod.volumes)


def test_the_torchx_component(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        importlib.import_module("torchx")
    except ImportError:  # what the component uses of it, as TorchX 0.7 has it

        def ddp(
            *script_args: str, m: str, image: str, name: str, cpu: int, gpu: int, memMB: int, j: str, max_retries: int,
            mounts: list[str],
        ) -> Any:  # fmt: skip
            words = ["torchrun", "--nnodes", j.rpartition("x")[0], "-m", m, *script_args]
            role = types.SimpleNamespace(
                image=image, args=["-c", " ".join(words)], num_replicas=4, max_retries=max_retries
            )
            return types.SimpleNamespace(name=name, roles=[role])

        specs = types.SimpleNamespace(AppDef=object)
        dist = types.SimpleNamespace(ddp=ddp)
        modules = {
            "torchx": types.SimpleNamespace(specs=specs, components=types.SimpleNamespace(dist=dist)),
            "torchx.specs": specs,
            "torchx.components": types.SimpleNamespace(dist=dist),
            "torchx.components.dist": dist,
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
    from examples.cluster.torchx_component import train  # imports what may not be installed

    monkeypatch.delitem(sys.modules, "examples.cluster.torchx_component")
    parameters = inspect.signature(train).parameters
    assert {parameter.annotation for parameter in parameters.values()} == {str, int}, (
        "TorchX cannot read texts of types"
    )
    described = re.findall(r"^    (\w+): ", inspect.getdoc(train) or "", re.MULTILINE)
    assert described == [*parameters], "TorchX takes the help of each argument from the docstring"
    app = train("/shared/run.yaml")
    (role,) = app.roles
    assert (role.image, role.num_replicas, role.max_retries) == ("shardrec:0.1.0", 4, 3)
    assert "--nnodes 1:4" in role.args[1]
    assert role.args[1].endswith(" ".join(TRAIN))


def test_the_containerfile() -> None:
    text = re.sub(r"\\\n", " ", (FOLDER / "Containerfile").read_text(encoding="utf-8"))
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    names = [name for name, _ in steps]
    assert {*names} == {"FROM", "RUN", "USER", "WORKDIR", "COPY", "ARG", "ENV", "CMD"}
    assert names[0] == "FROM"
    assert re.fullmatch(r"python:3\.\d+-slim", steps[0][1]), "the image's short name, without a registry"
    copied = [words.split() for name, words in steps if name == "COPY"]
    for _, *sources, _ in copied:
        for source in sources:
            assert (ROOT / source).exists(), source
    assert all(owner == "--chown=shardrec" for owner, *_ in copied)
    user, setup = names.index("USER"), next(i for i, (_, words) in enumerate(steps) if words.startswith("make setup"))
    assert steps[user][1] == "shardrec"
    assert any("useradd" in words and "shardrec" in words for _, words in steps[:user])
    assert user < names.index("COPY") < setup, "nothing of the clone is done as root"
    assert re.search(r"^setup: \$\(RUNTIME\)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert "://" not in text


def test_the_run() -> None:
    config = load_config(FOLDER / "run.yaml")
    assert config.data.files.startswith("s3://")
    assert config.output.publish is not None and config.output.publish.startswith("s3://")
    assert config.output.out is not None and config.output.out.startswith("/shared/")
    assert config.output.checkpoint_every is not None
