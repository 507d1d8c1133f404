"""The package's layers: no file imports itself by way of others, no folder one above it, and none reads another's
private attributes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from shardrec._late_imports import PROVIDED, late_import
from tests.syntax import nodes, tree

PACKAGE = Path(__file__).parent.parent / "shardrec"

LAYERS = [
    {"_late_imports", "errors", "memory"},
    {"_dynamo", "_torchscript", "_versions", "files"},
    {"native", "pending"},
    {"layout", "scripting"},
    {"exchange"},
    {"launch", "lookup"},
    {"ids"},
    {"planner", "step"},
    {"modules"},
    {"portable", "replicas"},
    {"checkpoint", "pipeline"},
    {"rpc"},
    {"serve"},
    {"trainer"},
]
"""A folder, or a file of the package itself, imports from its own layer's folders only itself, and from those above."""

TRAINER_LAYERS = [{"console", "yaml_files"}, {"calibrate", "data"}, {"models"}, {"run"}, {"cli"}]
"""The layers inside of ``shardrec.trainer``."""

DOOR = ["checkpoint", "files", "launch", "layout", "pipeline", "planner", "rpc", "serve"]
"""The modules of the library that the trainer imports from, besides ``shardrec`` itself, and only what they export."""


@cache
def files() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def trees() -> dict[str, list[ast.AST]]:
    """The nodes of each file."""
    return {name: nodes(path) for name, path in files().items()}


def imported(nodes: list[ast.stmt], *, for_types: bool) -> Iterator[str]:
    """Files of the package that these statements import, in functions too, and if asked for type checkers alone."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardrec"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in files() else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files())
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_types:
            yield from imported(node.orelse, for_types=False)
        else:
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from imported(getattr(node, field, []), for_types=for_types)


def graph(*, for_types: bool) -> dict[str, set[str]]:
    """The files that each file imports, or loads by their names (``import_module("shardrec.rpc.remote_model")``)."""
    return {
        name: {*imported(tree(path).body, for_types=for_types), *named(nodes(path))} - {name}
        for name, path in files().items()
    }


def named(inside: list[ast.AST]) -> set[str]:
    strings = {node.value for node in inside if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return (strings & files().keys()) - {"shardrec"}  # which is also the name of the program


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Not for type checkers either."""
    left = graph(for_types=True)
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in free}
    assert not left, f"these import each other in a circle, or import who does: {sorted(left)}"


@pytest.mark.parametrize(("house", "layers"), [("shardrec", LAYERS), ("shardrec.trainer", TRAINER_LAYERS)])
def test_layers_point_one_way(house: str, layers: list[set[str]]) -> None:
    level = {f"{house}.{name}": number for number, layer in enumerate(layers) for name in layer}
    depth = house.count(".") + 2
    wrong = []
    for name, targets in graph(for_types=False).items():
        for target in targets:
            importer, imported = (".".join(part.split(".")[:depth]) for part in (name, target))
            if importer == imported or not {importer, imported} <= level.keys():
                continue
            if level[imported] >= level[importer]:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(sorted(wrong))


def test_the_trainer_comes_in_by_the_door() -> None:
    """It imports names that ``shardrec`` or a module of the door exports, for type checkers too."""
    wrong = []
    for name, path in files().items():
        if not name.startswith("shardrec.trainer"):
            continue
        for node in nodes(path):
            imports = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [f"{name}:{node.lineno} imports {module}" for module in imports if module.startswith("shardrec.")]
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "shardrec":
                continue
            module = str(node.module)
            if module.startswith("shardrec.trainer") or (module == "shardrec" and node.names[0].name == "trainer"):
                continue
            if module.removeprefix("shardrec").removeprefix(".") not in ("", *DOOR):
                wrong.append(f"{name}:{node.lineno} imports from {module}")
                continue
            exported = {*import_module(module).__all__, "__version__", *(DOOR if module == "shardrec" else [])}
            hidden = {alias.name for alias in node.names} - exported
            wrong += [f"{name}:{node.lineno} imports {hidden}, which {module} does not export"] if hidden else []
    assert not wrong, "\n".join(wrong)


def test_the_library_knows_no_trainer() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, targets in graph(for_types=True).items()
        for target in targets
        if target.startswith("shardrec.trainer") and not name.startswith("shardrec.trainer")
    ]
    assert not wrong, "\n".join(wrong)


def test_a_base_name_occurs_once_in_a_house() -> None:
    """So that a name that an error, a log or a reader gives is of one file."""
    for house in (False, True):
        paths = [path for name, path in files().items() if name.startswith("shardrec.trainer") is house]
        counts = Counter(path.stem for path in paths if path.stem not in ("__init__", "__main__"))
        assert [stem for stem, count in counts.items() if count > 1] == []


LATE = {
    "benchmarks": "is there in a checkout only",
    "fbgemm_gpu": "a second, with torch",
    "fsspec": "of an extra",
    "matplotlib": "of an extra",
    "optuna": "of an extra",
    "pyarrow": "of an extra",
    "rich": "0.1 s, for those who see what it draws",
    "torch": "a second, which launchers and plans of tables do without",
    "torchrec": "a second, which launchers and plans of tables do without",
    "yaml": "0.02 s, for those who read or write a file",
}
"""Libraries that functions may import, and why."""


def late_imports(name: str) -> Iterator[tuple[int, str]]:
    """Line and module of each import inside a function without a comment on its line, or above it."""
    lines = files()[name].read_text().splitlines()
    for function in trees()[name]:
        inside = ast.walk(function) if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) else ()
        for node in inside:
            if isinstance(node, ast.Import | ast.ImportFrom):
                first = node.lineno - 1
                while lines[first - 1].lstrip().startswith(("import ", "from ")):
                    first -= 1
                if not any("#" in line for line in lines[first - 1 : node.end_lineno]):
                    yield node.lineno, (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name


def test_an_import_inside_a_function_has_a_reason() -> None:
    """Commands need none: each imports what it uses, so that ``--help`` answers at once."""
    wrong = {
        f"{name}:{line} imports {module}; say in a comment why not at the top"
        for name in files()
        for line, module in late_imports(name)
        if module.split(".")[0] not in LATE and not name.startswith("shardrec.trainer.cli.")
    }
    assert not wrong, "\n".join(sorted(wrong))


TORCHS = {"_library", "_modules", "_optimizer", "_save_to_state_dict", "_schema", "_timeout", "_type"}
"""Private names of torch's and of TorchRec's that are also names of ours."""


def folder_of(name: str) -> str:
    return ".".join(name.split(".")[: 3 if name.startswith("shardrec.trainer.") else 2])


def defined(inside: list[ast.AST]) -> Iterator[str]:
    """Names of the attributes that a file's classes have."""
    for node in inside:
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield member.name
                for target in getattr(member, "targets", [getattr(member, "target", None)]):
                    if isinstance(target, ast.Name):
                        yield target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def is_own(value: ast.expr) -> bool:
    """Whether an expression is the object itself: ``self``, ``cls`` or ``super()``."""
    inner = value.func if isinstance(value, ast.Call) else value
    return isinstance(inner, ast.Name) and inner.id in ("self", "cls", "super")


def test_private_attributes_stay_in_their_folder() -> None:
    owners: dict[str, set[str]] = {}
    for name, inside in trees().items():
        for attribute in defined(inside):
            owners.setdefault(attribute, set()).add(folder_of(name))
    wrong = []
    for name, inside in trees().items():
        for node in inside:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardrec."):
                private = [one.name for one in node.names if one.name.startswith("_")]
                if private and folder_of(str(node.module)) != folder_of(name):
                    wrong.append(f"{name}:{node.lineno} imports {private} of {node.module}")
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr in TORCHS:
                continue
            found = owners.get(node.attr, set())
            if found and folder_of(name) not in found and not is_own(node.value) and not node.attr.startswith("__"):
                wrong.append(f"{name}:{node.lineno} reads .{node.attr} of {sorted(found)}")
    assert not wrong, "\n".join(wrong)


def test_no_public_name_that_is_loaded_late_is_a_files() -> None:
    """Importing the file would put it in the name's place."""
    for name, path in files().items():
        if "\n_HOMES = " in path.read_text():
            hidden = {public for public in import_module(name)._HOMES if f"{name}.{public}" in files()}
            assert not hidden, f"{name}: {sorted(hidden)}"


def test_what_is_provided_from_above_is_asked_for_below_and_there() -> None:
    import_module("shardrec")
    asked = {
        node.args[0].value
        for inside in trees().values()
        for node in inside
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "late_import"
        and isinstance(node.args[0], ast.Constant)
    }
    assert asked == PROVIDED.keys()
    assert all(callable(late_import(name)) for name in PROVIDED)
