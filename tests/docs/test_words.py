"""Sentences and words that were replaced by those of PyTorch's docs do not come back."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPLACED = {
    "way to fill a rank": "configuration (bin packing)",
    "that are done at once now and then": "with two worker threads",
    "that shows the fused": "exposes the fused ...",
    "fall to 0": "decay to 0",
    "as those of so many hosts": "as if spread over so many hosts",
    "that is stored is not used": "storing a pending value does not wait for it",
    "cannot tell apart comes on top": "add rounding",
    "a word for error messages": "the name in errors, or an operation for each case",
    "by the square of": "O(n²)",
    "that are made of one": "derived from each",
    "for values that are none": "if a value ...",
    "for a name that is none": "if no ... has the name",
    "which road": "which file, mode or option",
    "is taken, too": "also accepts",
    "come apart": "issued different collectives",
    "likewise": "the value itself, or 'as :meth:`...` takes it'",
    "so many": "a number of ..., this number of ..., or the argument's name",
    "nobody": "no rank, no process, or the passive",
    "somebody": "the rank, the process, or the passive",
    "compiles it, too": "TorchScript also compiles it",
    "to the last bit": "bit-identical",
    "to the bit": "bit-identical",
    "did not come in time": "did not answer in time, or did not join in time",
    "a good step pays": "a step without a fault has no overhead",
    "what goes on around": "the context of ...",
    "what comes back": "the received rows",
}
"""What was written, in lower case, and what to write."""


@pytest.mark.parametrize("folder", ["shardrec", "docs", "examples", "benchmarks", "README.md"])
def test_replaced_words_do_not_come_back(folder: str) -> None:
    path = ROOT / folder
    pages = [path] if path.is_file() else [page for kind in ("*.py", "*.md") for page in sorted(path.rglob(kind))]
    for page in pages:
        text = " ".join(page.read_text().lower().replace("#", " ").split())
        for words, better in REPLACED.items():
            assert words not in text, f"{page.relative_to(ROOT)}: instead of {words!r} write as in {better!r}"
