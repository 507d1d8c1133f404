"""When queued calls are sent: in runs, each as long as the same run of the model's last forward in this mode.

A *run* is the calls that a model makes between two uses of their values::

    forward 1    a b . used . c . used         nothing is known: a run is taken to have as many calls as the model has
                                               modules, and the first use ends it
    forward 2    a b | used . c | used         the runs have 2 calls and 1: each is sent (|) with its last call

    OUTSIDE ── begin ──► FORWARD ── end ──► OUTSIDE       the runs made are the runs known in this mode
                            └────── fail ──► FAILED       at the next beginning nothing is known

Forwards with and without gradients are modes of their own: an evaluation may make fewer calls. A forward that raises on
one rank after its last exchange ends there as on the other ranks, which hear nothing of it.

A forward that a backward computes again (``torch.utils.checkpoint``) makes the exchanges of the forward before: torch
compares what the two have saved, in order.

Python does not see where a program of TorchScript begins and ends: its runs are known by the module that begins
them. If it has let go of the value of a call that is still queued, it has failed. All ranks run the same model and come
to the same decisions. The headers' checksum tells if they did not.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum, auto


class Phase(Enum):
    """Where a model is."""

    OUTSIDE = auto()
    FORWARD = auto()
    FAILED = auto()
    """Outside, after a forward that raises on all ranks: they failed at different places, and must not continue with
    other runs."""


class CallBatching:
    """Which call of a model is the last one of its run.

    Attributes:
        phase: where the model is.
    """

    def __init__(self) -> None:
        self.phase = Phase.OUTSIDE
        self._mode: Hashable = None  # of the present forward, or the last one
        self._runs: dict[Hashable, tuple[int, ...]] = {}  # of the last forward with calls, in which ranks compare modes
        self._calls: dict[Hashable, int] = {}  # of the last forward
        self._known: dict[Hashable, tuple[int, ...]] = {}  # runs that the last forward knew when it began
        self._is_again = False  # whether this forward computes another one again
        self._made = [0]  # calls per run of this forward
        self._first = 0  # the id of the module that made the first call of the present run
        self._of_programs: dict[int, int] = {}  # calls of the last run that began with this module

    @property
    def known(self) -> tuple[int, ...]:
        """Calls per run of the last forward in this mode, when this one began."""
        return self._known.get(self._mode, ())

    @property
    def lacks_calls(self) -> bool:
        """Whether this forward has made fewer calls than the last one in this mode. The first forward is compared with
        1 call."""
        return sum(self._made) < self._calls.get(self._mode, 1)

    def begin(self, mode: Hashable, *, is_again: bool = False) -> None:
        """A forward begins; with ``is_again``, one that has been made before."""
        if self.phase is Phase.FAILED:
            self.forget()
        self.phase, self._mode, self._made, self._is_again = Phase.FORWARD, mode, [0], is_again
        if not is_again:
            self._known[mode] = self._runs.get(mode, ())

    def end(self, *, ahead: bool = False) -> None:
        """The forward has ended. One that has made none of the calls made ``ahead`` of it is an exception."""
        self.use()
        runs = tuple(self._made[:-1])
        if runs and not self._is_again:
            self._runs[self._mode] = runs
        if (runs or not ahead) and not self._is_again:
            self._calls[self._mode] = sum(runs)
        self.phase, self._made = Phase.OUTSIDE, [0]

    def fail(self) -> None:
        """The forward raises on all ranks."""
        self.phase, self._made = Phase.FAILED, [0]

    def drop_run(self) -> None:
        """The present run of a program is not exchanged, or not on all ranks."""
        if self.phase is not Phase.FORWARD:
            self._made = [0]

    def forget(self) -> None:
        """Know nothing, as the other ranks: a forward has failed on all of them, perhaps in different modes."""
        self._runs.clear()
        self._calls.clear()
        self._known.clear()

    def call(self, module: int, modules: int, *, by_program: bool) -> bool:
        """A module is called. Whether that is the last call of its run, as far as one can know.

        Args:
            module: its id.
            modules: number of sharded modules of the model.
            by_program: TorchScript calls it.
        """
        if not self._made[-1]:
            self._first = module
        self._made[-1] += 1
        if self.phase is Phase.FORWARD:
            number, known = len(self._made) - 1, self._known.get(self._mode, ())
            expected = known[number] if number < len(known) else modules
        else:
            expected = self._of_programs.get(self._first, modules) if by_program else 1
        return self._made[-1] >= expected

    def use(self) -> None:
        """A value is used, which ends the run."""
        if not self._made[-1]:
            return
        if self.phase is Phase.FORWARD:
            self._made.append(0)
        else:
            self._of_programs[self._first] = self._made[-1]
            self._made = [0]
