"""Do the installed torch, fbgemm-gpu and torchrec belong together? Are the packages of an extra there?

fbgemm-gpu is a set of shared libraries built against one minor release of torch. Under another one it fails to load,
or loads and crashes later, and neither says why. The versions are read from the packages' metadata, before any of the
three is imported, so that the answer is a sentence and not a linker's message.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from typing import NamedTuple

from shardrec.errors import VersionError

_FBGEMM_BUILDS = ("fbgemm-gpu-cpu", "fbgemm-gpu")


@dataclass(frozen=True, kw_only=True)
class MatchingSet:
    """Three minor releases that were built for each other.

    Attributes:
        torch: minor release of torch, such as ``"2.13"``.
        fbgemm: minor release of fbgemm-gpu, for both its CPU and CUDA builds.
        torchrec: release of torchrec, the first of its minor one that was published, such as ``"1.6.1"``.
    """

    torch: str
    fbgemm: str
    torchrec: str


MATCHING_SETS: tuple[MatchingSet, ...] = (
    MatchingSet(torch="2.13", fbgemm="1.8", torchrec="1.8.0"),
    MatchingSet(torch="2.11", fbgemm="1.6", torchrec="1.6.1"),
)
"""Every set that shardrec supports, newest first. README says what ran with each."""


class _Found(NamedTuple):
    """One of the three packages as it is installed.

    Args:
        name: of its distribution.
        version: "" for a plain folder on the path, without metadata. None if it is not there.
    """

    name: str
    version: str | None

    def __str__(self) -> str:
        if self.version is None:
            return f"no {self.name}"
        return f"{self.name} {self.version or 'of unknown version'}"


_PLANNER, _PLOTS = ("highspy", "scipy"), ("matplotlib",)
EXTRAS = {
    "planner": _PLANNER,
    "plots": _PLOTS,
    "kafka": ("confluent_kafka",),
    "avro": ("fastavro",),
    "sweep": ("optuna",),
    "train": (*_PLANNER, *_PLOTS, "fsspec", "pyarrow", "tensorboard", "waitress", "werkzeug"),
}
"""The modules that each extra of the package brings; of extras that bring the same one, the smallest comes first."""


@functools.cache
def check_extra(extra: str) -> None:
    """Raises unless the packages of an extra are installed. Imports none of them.

    Args:
        extra: a key of :data:`EXTRAS`.

    Raises:
        VersionError: in one sentence, what is missing and how to install it.
    """
    missing = [name for name in EXTRAS[extra] if util.find_spec(name) is None]
    if missing:
        raise VersionError(
            f"shardrec was installed without {', '.join(missing)}, which its extra {extra!r} brings: "
            f"pip install 'shardrec[{extra}]'"
        )


@functools.cache
def check_versions() -> None:
    """Raises unless torch, fbgemm-gpu and torchrec are installed, match, and fbgemm-gpu's operators load.

    The parts of shardrec that compute call it before they import any of the three. It imports fbgemm-gpu (and so
    torch). Once it has passed, calling it again is free. A package that is a plain folder on the path, without
    metadata, as on a development machine, is taken to match if it imports.

    Raises:
        VersionError: in one sentence, the versions found and versions that would match.
    """
    torch, torchrec = _find("torch", "torch"), _find("torchrec", "torchrec")
    builds = [package for name in _FBGEMM_BUILDS if (package := _find(name, None)).version is not None]
    fbgemm = builds or [_find("fbgemm-gpu", "fbgemm_gpu")]
    trio = (torch, *fbgemm, torchrec)
    wanted = _wanted(torch)
    fits = (
        _fits(torch, wanted.torch)
        and all(_fits(build, wanted.fbgemm) for build in fbgemm)
        and _fits(torchrec, _minor(wanted.torchrec))
    )
    if not fits:
        raise VersionError(f"found {_listed(trio)}, which do not go together: {_remedy(wanted, fbgemm)}")
    _load(trio, wanted)


def _find(name: str, module: str | None) -> _Found:
    """The distribution ``name``, or the plain folder ``module`` if it has no metadata."""
    try:
        return _Found(name, metadata.version(name) or "")
    except metadata.PackageNotFoundError:
        return _Found(name, "" if module is not None and util.find_spec(module) is not None else None)


def _minor(version: str | None) -> str | None:
    match = re.match(r"\d+\.\d+", version or "")
    return match.group() if match else None


def _wanted(torch: _Found) -> MatchingSet:
    """The set for the installed torch, because a user is least willing to change it. Otherwise the newest set."""
    return next((each for each in MATCHING_SETS if each.torch == _minor(torch.version)), MATCHING_SETS[0])


def _fits(package: _Found, minor: str | None) -> bool:
    return package.version == "" or (package.version is not None and _minor(package.version) == minor)


def _load(packages: Sequence[_Found], wanted: MatchingSet) -> None:
    """Imports fbgemm-gpu and touches one operator: some of its libraries are allowed to fail silently."""
    try:
        with _without_its_warning():
            importlib.import_module("fbgemm_gpu")
        torch = importlib.import_module("torch")
        torch.ops.fbgemm.permute_2D_sparse_data  # noqa: B018 - the look-up itself is the test
    except Exception as error:  # a linker's OSError, an ImportError or an AttributeError, all with one meaning
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        text = f"found {_listed(packages)}, but fbgemm-gpu does not load ({reason}): {_remedy(wanted, packages[1:-1])}"
        raise VersionError(text) from error


@contextlib.contextmanager
def _without_its_warning() -> Iterator[None]:
    """fbgemm-gpu 1.6 does not know of itself, warns on the root logger, and so gives that a handler."""

    def is_another(record: logging.LogRecord) -> bool:
        return "_fbgemm_torch_compat_table has no entry" not in record.getMessage()

    root, silent = logging.getLogger(), logging.NullHandler()
    root.addHandler(silent)  # with a handler, the root logger is given no other
    root.addFilter(is_another)
    try:
        yield
    finally:
        root.removeFilter(is_another)
        root.removeHandler(silent)


def _listed(packages: Sequence[_Found]) -> str:
    texts = [str(each) for each in packages]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def _remedy(wanted: MatchingSet, fbgemm: Sequence[_Found]) -> str:
    others = " or ".join(
        f"torch {each.torch} with {each.fbgemm} and {each.torchrec}" for each in MATCHING_SETS if each != wanted
    )
    installed = [each.name for each in fbgemm if each.version]
    build = installed[0] if len(installed) == 1 else "fbgemm-gpu-cpu"
    remove = "uninstall both builds of fbgemm-gpu, which overwrite each other, then " if len(installed) > 1 else ""
    return (
        f"torch {wanted.torch} goes with fbgemm-gpu {wanted.fbgemm} and torchrec {wanted.torchrec} ({others}), so"
        f" {remove}install torch=={wanted.torch}.0 and {build}=={wanted.fbgemm}.0, and torchrec=={wanted.torchrec} with"
        " pip's --no-deps"
    )
