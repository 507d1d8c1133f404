"""docs/migration.md answers each public name of the installed TorchRec, and the names of shardrec in it exist."""

from __future__ import annotations

import ast
import re
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torchrec

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
TORCHREC = Path(torchrec.__file__).parent
ANSWERS = ("same", "counterpart", "not needed", "left out")
OTHER = "Other modules"
TUTORIALS = {
    "torchrec.datasets.random": "RandomRecDataset",
    "torchrec.datasets.utils": "Batch",
    "torchrec.distributed.embedding": "EmbeddingCollectionSharder",
    "torchrec.distributed.embedding_types": "EmbeddingComputeKernel",
    "torchrec.distributed.embeddingbag": "EmbeddingBagCollectionSharder",
    "torchrec.distributed.fbgemm_qcomm_codec": "CommType QCommsConfig get_qcomm_codecs_registry",
    "torchrec.distributed.fused_embeddingbag": "FusedEmbeddingBagCollectionSharder",
    "torchrec.distributed.model_parallel": "DMPCollection",
    "torchrec.distributed.planner.enumerators": "EmbeddingEnumerator",
    "torchrec.distributed.planner.partitioners": "GreedyPerfPartitioner",
    "torchrec.distributed.planner.proposers": "GreedyProposer",
    "torchrec.distributed.planner.shard_estimators": "EmbeddingPerfEstimator EmbeddingStorageEstimator",
    "torchrec.distributed.planner.storage_reservations": "HeuristicalStorageReservation",
    "torchrec.distributed.quant_embeddingbag": "QuantEmbeddingBagCollectionSharder",
    "torchrec.distributed.types": "EmbeddingModuleShardingPlan LazyAwaitable ShardingPlan ShardingType",
    "torchrec.inference.model_packager": "PredictFactoryPackager load_pickle_config",
    "torchrec.inference.modules": "PredictFactory PredictModule quantize_embeddings quantize_inference_model "
    "shard_quant_model",
    "torchrec.inference.state_dict_transform": "state_dict_gather state_dict_to_device",
    "torchrec.metrics.throughput": "ThroughputMetric",
    "torchrec.models.dlrm": "DLRM DLRMTrain",
    "torchrec.modules.embedding_configs": "QuantConfig",
    "torchrec.modules.fused_embedding_modules": "fuse_embedding_optimizer",
    "torchrec.modules.hash_mc_evictions": "HashZchEvictionConfig HashZchEvictionPolicyName",
    "torchrec.modules.hash_mc_modules": "HashZchManagedCollisionModule",
    "torchrec.modules.mc_embedding_modules": "ManagedCollisionEmbeddingCollection",
    "torchrec.modules.mc_modules": "DistanceLFU_EvictionPolicy MCHManagedCollisionModule ManagedCollisionCollection",
    "torchrec.modules.mlp": "MLP",
    "torchrec.optim.optimizers": "in_backward_optimizer_filter",
}
"""Names that TorchRec's tutorials, examples and API reference import from modules, and no package exports."""


def exports() -> dict[str, dict[str, Any]]:
    """By package of TorchRec, the classes and functions that its ``__init__.py`` imports from TorchRec's modules."""
    packages = dict[str, dict[str, Any]]()
    for path in sorted(TORCHREC.rglob("__init__.py")):
        name = ".".join(["torchrec", *path.parent.relative_to(TORCHREC).parts])
        imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        aliases = [alias for node in imports if (node.module or "").startswith("torchrec") for alias in node.names]
        if path.parent.name == "test_utils":
            continue
        values = {alias.name: getattr(import_module(name), alias.name) for alias in aliases if alias.name[0] != "_"}
        packages[name] = {each: value for each, value in values.items() if not isinstance(value, ModuleType)}
    return {package: names for package, names in packages.items() if names}


def rows() -> list[tuple[str, list[str], str, str]]:
    """Section, names, answer and what the page says, of each row of its tables of names."""
    table = []
    for section in PAGE.split("\n### ")[1:]:
        title, _, body = section.partition("\n")
        for line in body.splitlines():
            if line.startswith("| `"):
                names, answer, text = (cell.strip() for cell in line.strip("| ").split(" | "))
                table.append((title.strip("`"), re.findall(r"`(\w+)`", names), answer, text))
    return table


def test_each_public_name_is_answered() -> None:
    """A package's name in its section, or in the section of another package that exports the same object."""
    packages = exports()
    assert len(packages) >= 7
    assert sum(map(len, packages.values())) >= 81
    answered = {(section, name) for section, names, _, _ in rows() for name in names}
    objects = {id(packages[section][name]) for section, name in answered if name in packages.get(section, {})}
    missing = [
        f"{package}.{name}"
        for package, values in packages.items()
        for name, value in values.items()
        if (package, name) not in answered and id(value) not in objects
    ]
    assert missing == [], "add a row to docs/migration.md"


def test_a_missing_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PAGE", PAGE.replace("`CombinedOptimizer`, ", ""))
    with pytest.raises(AssertionError, match=r"torchrec\.optim\.CombinedOptimizer"):
        test_each_public_name_is_answered()


@pytest.mark.parametrize("module", TUTORIALS)
def test_each_name_of_the_tutorials_is_answered(module: str) -> None:
    answered = {name for section, names, _, _ in rows() if section == OTHER for name in names}
    for name in TUTORIALS[module].split():
        assert hasattr(import_module(module), name)
        assert name in answered, f"add a row for {module}.{name} to docs/migration.md"


@pytest.mark.skipif(not metadata.version("torchrec").startswith("1.8"), reason="the page is that of TorchRec 1.8")
def test_each_name_on_the_page_is_torchrec_s() -> None:
    packages = exports()
    packages[OTHER] = {name: None for names in TUTORIALS.values() for name in names.split()}
    for section, names, _, _ in rows():
        assert [name for name in names if name not in packages[section]] == [], section


def test_answers_say_what_to_write_or_why_not() -> None:
    for _, names, answer, text in rows():
        assert answer in ANSWERS, names
        assert text, names
        if answer == "counterpart":
            assert re.search(r"`(shardrec|torch)\.", text), f"{names}: name the counterpart"


def test_names_of_shardrec_on_the_page_exist() -> None:
    names = set(re.findall(r"`(shardrec(?:\.\w+)+)", PAGE))
    assert len(names) > 30
    for name in sorted(names):
        value: Any = import_module("shardrec")
        for part in name.split(".")[1:]:
            value = getattr(value, part)
