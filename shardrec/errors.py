"""Every error that shardrec raises on purpose.

::

    ShardrecError
    ├── VersionError   (ImportError)   torch, fbgemm and torchrec do not match
    ├── ConfigError    (ValueError)    an option, optimizer or constraint that cannot be honoured
    ├── PlanError      (ValueError)    a plan that does not cover its tables; lists every fault
    ├── InputError     (ValueError)    a batch that the model cannot take; raised on every rank
    ├── AnomalyError   (RuntimeError)  NaN or Inf in rows or gradients, if it is looked for; raised on every rank
    ├── DataError      (ValueError)    a file with a broken row; names file, line and field
    ├── CheckpointError (ValueError)   a checkpoint that is damaged, or cannot be written; raised on every rank
    ├── PeerError      (RuntimeError)  another rank, or a server, failed or is gone
    │   └── BusyError                  a server's queue is full, and nothing was done
    ├── PipelineError  (RuntimeError)  a stage failed, or a skip was not used as declared
    ├── ScriptError    (RuntimeError)  a model that TorchScript refuses; names file and line (in shardrec.scripting)
    ├── ExportError    (RuntimeError)  a model that torch.export or AOTInductor refuses (in shardrec.serve)
    └── AwaitableError (RuntimeError)  an awaitable used as none can be

Each message names the object, the value that was seen and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AnomalyError",
    "AwaitableError",
    "BusyError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "InputError",
    "PeerError",
    "PipelineError",
    "PlanError",
    "ShardrecError",
    "VersionError",
]


class ShardrecError(Exception):
    """Base class: ``except ShardrecError`` catches everything below."""


class VersionError(ShardrecError, ImportError):
    """The installed torch, fbgemm-gpu and torchrec were not built for each other."""


class ConfigError(ShardrecError, ValueError):
    """An option, optimizer setting or constraint that shardrec cannot honour."""


class PlanError(ShardrecError, ValueError):
    """A sharding plan (or a cut) that cannot be carried out.

    Args:
        faults: one sentence per fault. All of them are in the message.
        remedies: changes. Each one is sufficient. Empty for other errors.

    Attributes:
        faults: the same sentences, in order.
        remedies: the same changes, in order.
    """

    def __init__(self, faults: Sequence[str] | str, remedies: Sequence[str] = ()) -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        self.remedies = tuple(remedies)
        if len(self.faults) == 1:
            text = self.faults[0]
        else:
            lines = "\n".join(f"  {i}. {fault}" for i, fault in enumerate(self.faults, 1))
            text = f"the sharding plan has {len(self.faults)} faults:\n{lines}"
        if self.remedies:
            which = "Each of these" if len(self.remedies) > 1 else "This"
            text += "\n".join([f"\n{which} is sufficient:", *(f"  - {remedy}" for remedy in self.remedies)])
        super().__init__(text)

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[str, ...], tuple[str, ...]]]:
        return type(self), (self.faults, self.remedies)


class InputError(ShardrecError, ValueError):
    """A batch that the sharded model cannot take. Every rank raises it at the same step."""


class AnomalyError(ShardrecError, RuntimeError):
    """Rows of a table, or their gradients, are NaN or Inf. Raised inside :func:`shardrec.detect_anomaly`."""


class DataError(ShardrecError, ValueError):
    """A data file with a row that cannot be read; the message has ``file:line: field``."""


class CheckpointError(ShardrecError, ValueError):
    """A checkpoint that is damaged or incomplete, or that cannot be read or written. Every rank raises it."""


class PeerError(ShardrecError, RuntimeError):
    """Another rank failed or is gone, so that this rank cannot continue.

    Args:
        message: the whole text.
        ranks: of the default group that have ended, are stopped, or did not come, as far as that is known.
        waited_for: what this rank did with the others, such as "header exchange".
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), waited_for: str = "") -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.waited_for = waited_for

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, tuple[int, ...], str]]:
        return type(self), (str(self), self.ranks, self.waited_for)


class BusyError(PeerError):
    """A server's queue is full, or it is ending. Nothing of the request was done. It can be made again."""


class PipelineError(ShardrecError, RuntimeError):
    """A stage failed, on another rank if the traceback in the message says so, or a skip was not used as declared."""


class AwaitableError(ShardrecError, RuntimeError):
    """An awaitable was used in a way that cannot return its value, or would return a wrong one."""
