"""The points of a model's step at which other parts of the model have something to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LifeCycle:
    """The points of a model's step, in the order in which a step reaches them. Eager, scripted and traced steps reach
    the same ones.

    Each is a list of functions, which are called in order. An error that one raises is the step's. Who subscribes to a
    point with a method of an object that may be dropped before the model gives a
    :func:`~shardrec.exchange.backward_watch.weak_hook`.

    Attributes:
        forward_begins: a forward with gradients begins; in a scripted program, the first call of its first collection.
        look_up_begins: the exchange of some calls begins, in any mode, whoever made the calls.
        rows_looked_up: called with a module's plan and the rows looked up in this rank's shards, before they are sent.
        value_made: called with a call and its value, in the call's mode.
        backward_begins: of a model with a process group, at the first step in the model of each graph task, before any
            gradient is averaged or sent. The backward of a scripted or traced program has several.
        gradients_go_back: in each backward, before the gradients of an exchange's rows are sent; on one rank, only
            between the operators of a scripted or traced program.
        gradients_averaged: called with the parameters with gradients that the ranks of a replica have averaged, also
            frozen ones, before the gradients are used.
        tables_update: the gradients of replicated tables are averaged, and the gradients of cut tables have been sent.
    """

    def __init__(self) -> None:
        self.forward_begins: list[Callable[[], None]] = []
        self.look_up_begins: list[Callable[[], None]] = []
        self.rows_looked_up: list[Callable[[Any, Any], None]] = []
        self.value_made: list[Callable[[Any, Any], None]] = []
        self.backward_begins: list[Callable[[], None]] = []
        self.gradients_go_back: list[Callable[[], None]] = []
        self.gradients_averaged: list[Callable[[Any], None]] = []
        self.tables_update: list[Callable[[], None]] = []

    def points(self) -> dict[str, list[Callable[..., None]]]:
        """The lists, by name; to take back what was subscribed, keep copies of them."""
        return vars(self)
