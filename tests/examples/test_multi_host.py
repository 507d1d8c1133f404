"""Two agents with two ranks each on this machine, and the files for clusters."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from examples.multi_host.main import HOSTS, RANKS_PER_HOST, main

FOLDER = Path(__file__).parents[2] / "examples" / "multi_host"


@pytest.mark.slow
def test_two_hosts_train_as_one_run(tmp_path: Path) -> None:
    final = main(tmp_path / "run", samples=20_000)
    assert final["auc"] > 0.6
    plan = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    assert plan["topology"]["hosts"] == HOSTS
    assert plan["topology"]["ranks_per_host"] == RANKS_PER_HOST


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_scripts_are_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


def test_the_job_is_yaml() -> None:
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert f"--nnodes={job['spec']['completions']}" in command
    assert any(f"{service['metadata']['name']}-0.{service['metadata']['name']}:" in word for word in command)
