"""``open_click_data``: generated rows or files of rows, by what is given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from shardrec import ConfigError
from shardrec.trainer.data.files import FileClickData
from shardrec.trainer.data.spec import FeatureSpec, criteo_spec
from shardrec.trainer.data.synthetic import SyntheticClickData
from shardrec.trainer.data.synthetic_config import SyntheticConfig
from shardrec.trainer.data.urls import files_of

__all__ = ["open_click_data"]


def open_click_data(
    source: SyntheticConfig | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    spec: FeatureSpec | None = None,
    **options: Any,
) -> FileClickData | SyntheticClickData:
    """Opens rows of clicks.

    Args:
        source: a :class:`SyntheticConfig`; or files, read as one stream: a name, a folder, a pattern, a URL of one of
            these, or a sequence of them.
        spec: what the files' columns are; :func:`criteo_spec` by default.
        options: of :class:`FileClickData`.

    Returns:
        The source, as a :class:`ClickData`; a synthetic one also has ``best_metrics()``, a file ``skipped``.

    Raises:
        ConfigError: an option out of range, or one for files given with a :class:`SyntheticConfig`.
        DataError: a file that cannot be read.
    """
    if isinstance(source, SyntheticConfig):
        option_names = [*options, *(["spec"] if spec is not None else [])]
        if option_names:
            raise ConfigError(f"{', '.join(option_names)} given with a SyntheticConfig: set its own fields instead")
        return SyntheticClickData(source)
    paths = [source] if isinstance(source, (str, os.PathLike)) else source
    files = [name for path in paths for name in files_of(os.fspath(path))]
    return FileClickData(files, criteo_spec() if spec is None else spec, **options)
