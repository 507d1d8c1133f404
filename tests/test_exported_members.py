"""The names of ``import shardrec``: each is there, documented, and costs nothing before it is used."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import shardrec

ROOT = Path(__file__).parents[1]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", shardrec.__all__)
def test_resolves_and_is_documented(name: str) -> None:
    value = getattr(shardrec, name)
    assert inspect.isclass(value) or inspect.isfunction(value)
    # Await and awaitable are torch's own objects, which it names with an underscore.
    assert value.__name__ == (f"_{name}" if value.__module__.startswith("torch.") and name != "fork" else name)
    # A class without its own text shows its base's, or dataclass's signature.
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert text
    assert text.strip()
    assert not text.startswith(f"{name}(")


def test_all_is_sorted_and_listed_by_dir() -> None:
    assert shardrec.__all__ == sorted(shardrec.__all__)
    assert set(shardrec.__all__) <= set(dir(shardrec))


def test_every_lazy_name_is_public() -> None:
    assert set(shardrec._HOMES) <= set(shardrec.__all__)
    assert len(shardrec.__all__) <= 34


def test_no_submodule_hides_a_function() -> None:
    """Importing ``shardrec.plan`` would rebind ``shardrec.plan``, whichever came first."""
    modules = {path.stem for path in (ROOT / "shardrec").iterdir()}
    assert modules.isdisjoint(shardrec.__all__)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'shrad'"):
        _ = shardrec.shrad  # type: ignore[attr-defined]


def test_import_is_light() -> None:
    heavy = "{'torch', 'fbgemm_gpu', 'torchrec', 'numpy', 'scipy', 'matplotlib', 'triton'}"
    assert run(f"import sys, shardrec; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_submodules_are_attributes_and_layout_is_pure() -> None:
    code = "import sys, shardrec; print(shardrec.layout.__name__, 'fbgemm_gpu' in sys.modules)"
    assert run(code) == "shardrec.layout False"


def test_versions_are_checked_before_a_computing_name() -> None:
    code = (
        "import shardrec; from shardrec import _versions\n"
        "def refuse(): raise shardrec.errors.VersionError('refused')\n"
        "_versions.check_versions = refuse\n"
        "try: shardrec.shard\n"
        "except shardrec.errors.VersionError as error: print(error)"
    )
    assert run(code) == "refused"


def test_version_is_that_of_the_metadata() -> None:
    lines = (ROOT / "setup.cfg").read_text(encoding="utf-8").splitlines()
    assert f"version = {shardrec.__version__}" in lines
