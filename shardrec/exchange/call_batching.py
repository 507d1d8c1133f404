"""When queued calls are sent: in runs, each as long as the same run of the model's last forward.

A *run* is the calls that a model makes between two uses of their values::

    forward 1    a b . used . c . used         nothing is known: a run is taken to have as many calls as the model has
                                               modules, and the first use ends it
    forward 2    a b | used . c | used         the runs have 2 calls and 1: each is sent (|) with its last call

    OUTSIDE ── begin ──► FORWARD ── end ──► OUTSIDE       the runs made are the runs known
                            └────── fail ──► FAILED       at the next beginning nothing is known

A program of TorchScript's has no beginning and no end that Python sees: its runs are known by the module that begins
them. All ranks run the same model and come to the same decisions; the headers' checksum tells if they did not.
"""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["CallBatching", "Phase"]


class Phase(Enum):
    """Where a model is."""

    OUTSIDE = auto()
    FORWARD = auto()
    FAILED = auto()
    """Outside, after a forward that raised: ranks that failed at different places must not go on with other runs."""


class CallBatching:
    """Which call of a model is the last one of its run.

    Attributes:
        phase: where the model is.
        known: calls of each run of the last forward.
    """

    def __init__(self) -> None:
        self.phase = Phase.OUTSIDE
        self.known: tuple[int, ...] = ()
        self._made = [0]  # calls of each run of this forward
        self._first = 0  # the id of the module that made the first call of the present run
        self._of_programs: dict[int, int] = {}  # calls of the last run that began with this module

    def begin(self) -> None:
        """A forward begins."""
        if self.phase is Phase.FAILED:
            self.known = ()
        self.phase, self._made = Phase.FORWARD, [0]

    def end(self) -> None:
        """The forward has ended."""
        self.use()
        self.phase, self.known, self._made = Phase.OUTSIDE, tuple(self._made[:-1]), [0]

    def fail(self) -> None:
        """The forward has raised."""
        self.phase, self._made = Phase.FAILED, [0]

    def forget(self) -> None:
        """Know nothing, where another rank's forward has failed and that rank knows nothing either."""
        self.known = ()

    def call(self, module: int, modules: int, *, by_program: bool) -> bool:
        """A module is called; whether that is the last call of its run, as far as one can know.

        Args:
            module: its id.
            modules: number of sharded modules of the model.
            by_program: TorchScript calls it.
        """
        if not self._made[-1]:
            self._first = module
        self._made[-1] += 1
        if self.phase is Phase.FORWARD:
            number = len(self._made) - 1
            expected = self.known[number] if number < len(self.known) else modules
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
