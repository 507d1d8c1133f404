"""``shardrec.Publisher``: publishes the rows of a model that have changed, while it trains.

[Note: what a step waits for] A rank keeps a copy of its rows as they were last published. ``publish`` compares them
with the model's, in one pass at the speed of memory, and copies those that differ. A thread then encodes and writes
these rows. The threads of the ranks agree over a process group of their own.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardrec.checkpoint.changes import PartKey, SavedBefore, different_rows, shards_of
from shardrec.checkpoint.data_files import BLOCK_BYTES, SavedFile
from shardrec.checkpoint.manifest import Manifest, write_manifest
from shardrec.checkpoint.parts import HeldTensor, Part, Rect, as_matrix
from shardrec.checkpoint.save import REMEDY, PendingSave, Written, joined, write_rank
from shardrec.errors import ConfigError, ShardrecError
from shardrec.exchange.agree import Ranks, gloo_ranks, on_all_ranks
from shardrec.exchange.peers import peers
from shardrec.files import Store
from shardrec.modules.sharded_model import ShardedModel, require_sharded
from shardrec.replicas.replicated_model import ReplicatedModel
from shardrec.serve.published import base_of, data_name, encoded, published_tensors, version_name, versions_in
from shardrec.serve.quantize import CHUNK, table_formats, whole_row_ranges
from shardrec.serve.served_model import ServedModel

Changed = dict[PartKey, Tensor | None]
"""The rows per part that have changed since the last publish, (n,) int64 ascending. None for all."""


class Publisher:
    """Publishes versions of a model to a folder, from which served models follow it; see docs/serving.md.

    A version is a *base*, with all rows, or a *delta*, with the rows that have changed since the version before it, and
    always has the dense part. Applied one after the other they equal the result of :func:`shardrec.serve.quantize` for
    the model. The first version that a process publishes is a base. The version after a failure is a base as well.
    Every rank makes the same calls.

    Args:
        model: from :func:`shardrec.shard`.
        target: a folder that all ranks share, or a URL of a file system of pyarrow's or fsspec's. One publisher at a
            time may write to it.
        weights: format of the rows: ``"fp32"``, ``"fp16"``, ``"int8"`` or ``"int4"``, as for ``quantize``.
        tables: formats of single tables, by their names in the plan.
        keep_bases: number of bases to keep with their deltas. Older ones are removed when a new one is complete.
        most_deltas: of a base. The next version is a base, as it is when the deltas have more bytes than their base.

    Raises:
        ConfigError: for a model or formats that ``quantize`` refuses, or a number below 1.

    The idea is from Monolith (Liu et al., 2022, section 2.4). It keeps the ids of a step's rows for this; here rows
    are compared, so that a change without a lookup (an eviction, a load, an edit) is also published.
    """

    def __init__(
        self,
        model: ShardedModel,
        target: str | Path,
        weights: str = "fp32",
        *,
        tables: Mapping[str, str] | None = None,
        keep_bases: int = 2,
        most_deltas: int = 100,
    ) -> None:
        require_sharded(model, "shardrec.Publisher")
        if isinstance(model, ServedModel) or model.servers:
            raise ConfigError(
                "shardrec.Publisher takes a model that is trained, with its tables on its ranks: give it what "
                "shardrec.shard returned without servers"
            )
        if keep_bases < 1 or most_deltas < 1:
            raise ConfigError(f"keep_bases={keep_bases} and most_deltas={most_deltas}. Give 1 or more for both")
        self._model, self._plan = model, model.plan
        self._formats = table_formats(list(model.sharded_collections), weights, tables or {})
        self._store = Store(target)
        self._keep_bases, self._most_deltas = keep_bases, most_deltas
        self._ranks: Ranks | None = None
        self._kept: dict[PartKey, Tensor] = {}
        self._ranges: dict[PartKey, Tensor] = {}
        self._before = SavedBefore()
        self._data = ""
        self._deltas = self._delta_bytes = self._base_bytes = 0
        self._pending = PendingSave()
        self.version = 0
        """The last version that is complete. 0 for none."""

    @torch.inference_mode(False)  # an inference tensor could not be written later
    def publish(
        self, *, full: bool = False, extra: Mapping[str, object] | None = None, wait: bool = True
    ) -> PendingSave:
        """Publish the model as it is now. If the last version is still being written, wait for that first.

        Args:
            full: begin a new base.
            extra: JSON-compatible data of the caller, such as the step. Rank 0's is written.
            wait: whether to return after the version is complete and visible; if False, return when the changed rows
                are copied.

        Returns: The publish, to wait for.

        Raises:
            ConfigError: on every rank, if a format cannot represent a value, or the model has a tensor that cannot be
                published. The next version is a base.
            CheckpointError: on every rank, if one cannot write. With ``wait=False``, :meth:`PendingSave.wait` raises
                it, or else the next publish.
            PeerError: if another rank is gone.
        """
        self._pending.wait()
        model = self._model
        if self._ranks is None:
            self._ranks = gloo_ranks(model.ranks, "publish")
        if isinstance(model, ReplicatedModel):
            model.sync_replicas()
        if self._plan is not model.plan:  # what is kept of a shard that comes back is older than others
            self._plan, self._before.complete = model.plan, False
            self._kept.clear()
            self._ranges.clear()
        # Until the version is complete, changes cannot be read on top of any version.
        known, self._before.complete = self._before.complete, False
        base = full or not known or self._deltas >= self._most_deltas or self._delta_bytes > self._base_bytes
        tensors, changed = self._copied(published_tensors(model))
        note = {"published": time.time(), "extra": dict(extra or {})}
        self._pending = PendingSave(lambda: self._publish(tensors, changed, note, base=base))
        if wait:
            self._pending.wait()
        return self._pending

    def _copied(self, tensors: Mapping[str, HeldTensor]) -> tuple[dict[str, HeldTensor], Changed]:
        """This rank's part of the tensors on the CPU, and the changed rows. See [Note: what a step waits for]."""
        changed: Changed = {}
        copies: dict[str, HeldTensor] = {}
        for name, tensor in tensors.items():
            parts = [
                replace(part, values=self._copy((name, part.rect), part, tensor, changed))
                for part in tensor.parts
                if part.saved
            ]
            copies[name] = replace(tensor, parts=tuple(parts))
        for shard in shards_of(copies).values():
            of_parts = [changed[key] for key in shard]
            rows = [part_rows for part_rows in of_parts if part_rows is not None]
            union = torch.cat(rows).unique() if len(rows) == len(of_parts) else None
            changed |= dict.fromkeys(shard, union)
        return copies, changed

    def _copy(self, key: PartKey, part: Part, tensor: HeldTensor, changed: Changed) -> Tensor:
        if not tensor.rows_of:
            return part.values.detach().to("cpu", copy=True)
        matrix, kept = as_matrix(part.values.detach()), self._kept.get(key)
        if kept is None or (kept.shape, kept.dtype) != (matrix.shape, matrix.dtype):
            changed[key], self._kept[key] = None, matrix.to("cpu", copy=True)
            return self._kept[key]
        rows, length = [], max(1, BLOCK_BYTES // 8 // (matrix.size(1) * matrix.itemsize))
        for start in range(0, len(matrix), length):
            new, old = matrix[start : start + length].cpu(), kept[start : start + length]
            different = different_rows(new, old)
            old[different] = new[different]
            rows.append(different + start)
        changed[key] = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        return kept

    def _publish(
        self, copies: Mapping[str, HeldTensor], changed: Changed, note: dict[str, object], *, base: bool
    ) -> None:
        """Write a version: what the thread does."""
        ranks, store = self._ranks, self._store
        assert ranks is not None, "publish has made it"

        def begin() -> tuple[int, str, bool]:
            version = max([self.version, *versions_in(store.names())]) + 1
            return version, data_name(version, secrets.token_hex(4)), base

        begun = on_all_ranks(begin, ranks, "publish", remedy=REMEDY)
        version, data, _ = begun[0]
        base = any(on_rank for *_, on_rank in begun)
        if base:
            self._before = SavedBefore()
        else:
            data = self._data
        tensors, changed = self._encoded(copies, changed, ranks, base=base)
        file_name = f"rank-{{:05}}.{version:012}.safetensors"

        def write() -> tuple[Written, list[SavedFile]]:
            folder = store.folder / data
            folder.mkdir(parents=True, exist_ok=True)
            most = self._most_deltas + 1
            self._before.complete = not base
            written = write_rank(folder, ranks.rank, tensors, self._before, most, changed, file_name=file_name)
            store.send(f"{data}/{file_name.format(ranks.rank)}")
            return written

        written = on_all_ranks(write, ranks, "publish", remedy=REMEDY)

        def complete() -> None:
            if ranks.rank:
                return
            formats = {table: form.value for table, form in self._formats.items()}
            extra = {"version": version, "formats": formats, **note}
            manifest = Manifest(data=data, numbers={}, step_counts={}, param_groups=None, extra=extra)
            manifest = joined(store.folder if store.is_folder else None, manifest, written)
            write_manifest(store.folder, manifest, version_name(version))
            store.send(version_name(version))
            if base:
                self._expire(version, data)

        on_all_ranks(complete, ranks, "publish", remedy=REMEDY)
        written_bytes = sum(file.size for (file, _), _ in written)
        self._deltas = 0 if base else self._deltas + 1
        self._base_bytes = written_bytes if base else self._base_bytes
        self._delta_bytes = 0 if base else self._delta_bytes + written_bytes
        self.version, self._data, self._before.complete = version, data, True

    def _encoded(
        self, copies: Mapping[str, HeldTensor], changed: Changed, ranks: Ranks, *, base: bool
    ) -> tuple[dict[str, HeldTensor], Changed]:
        """The tensors as they are written, and their changed rows.

        A quantized row has one scale for all of its columns: if they are on several ranks, these write the row if it
        has changed on any.
        """
        tensors, written = {}, {}
        for name, copy in copies.items():
            form = self._formats.get(copy.rows_of) if name.startswith("model.") else None
            ranges: dict[Rect, Tensor] = {}
            if form is not None and form.is_quantized and len(self._plan.by_name[copy.rows_of].stripes()) > 1:
                for part, rows, part_ranges in self._whole_rows(name, copy, changed, ranks, base=base):
                    changed[name, part.rect], ranges[part.rect] = rows, part_ranges
            tensors[name] = copy if form is None else encoded(copy, form, ranges)
            for part, tensor_part in zip(copy.parts, tensors[name].parts, strict=True):
                if copy.rows_of:
                    written[name, tensor_part.rect] = changed[name, part.rect]
        return tensors, written

    def _whole_rows(
        self, name: str, copy: HeldTensor, changed: Changed, ranks: Ranks, *, base: bool
    ) -> list[tuple[Part, Tensor, Tensor]]:
        """The parts of a table, their rows that have changed on any rank, and (rows, 2) the ranges of all.

        Ranges of unchanged rows are kept, because a delta may write all rows. A base computes all ranges again:
        after a failure those that are kept may be older than the rows.
        """
        mask = torch.full((copy.shape[0],), int(base), dtype=torch.uint8)
        for part in copy.parts:
            rows = changed[name, part.rect]
            mask[part.rect.row_start : part.rect.row_end][slice(None) if rows is None else rows] = 1
        group = ranks.group
        if group is not None:
            with peers(group, "publish"):
                dist.all_reduce(mask, dist.ReduceOp.MAX, group)
        of_parts = [
            (part, self._ranges.setdefault((name, part.rect), torch.zeros((len(part.values), 2), dtype=torch.float32)))
            for part in copy.parts
        ]
        for rows in mask.nonzero().squeeze(1).split(CHUNK):
            weights = [(part.rect.row_start, part.values) for part in copy.parts]
            ranges = whole_row_ranges(weights, rows, torch.device("cpu"), group)
            for part, part_ranges in of_parts:
                here = (rows >= part.rect.row_start) & (rows < part.rect.row_end)
                part_ranges[rows[here] - part.rect.row_start] = ranges[here]
        return [
            (part, mask[part.rect.row_start : part.rect.row_end].nonzero().squeeze(1), part_ranges)
            for part, part_ranges in of_parts
        ]

    def _expire(self, version: int, data: str) -> None:
        """Remove the bases before the last ones with their versions, and the remains of an interrupted publish."""
        try:
            names = self._store.names()
            bases = {name: base for name in names if (base := base_of(name)) is not None}
            kept = sorted({base for base in bases.values() if base <= version})[-self._keep_bases :]
            for old in versions_in(names):
                if old < kept[0]:
                    self._store.remove(version_name(old))
            for name, base in bases.items():
                if base < kept[0] or (base == version and name != data):
                    self._store.remove(name)
        except (OSError, ShardrecError) as error:
            warnings.warn(f"versions that have expired could not be removed ({error})", stacklevel=2)
