"""Objects that operators call back to, by number, for as long as their owners live.

An operator takes tensors, numbers and text. One that has to reach an object of Python is given the object's number.
"""

from __future__ import annotations

from itertools import count
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from shardrec.errors import ConfigError

__all__ = ["Live"]

T = TypeVar("T")


class Live(Generic[T]):
    """Objects of one kind.

    Args:
        what: a word for messages, such as "tables".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._numbers = count()
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, one: T) -> int:
        """The number of ``one`` from now on; who owns ``one`` keeps it alive."""
        number = next(self._numbers)
        self._objects[number] = one
        return number

    def __getitem__(self, number: int) -> T:
        """The object.

        Raises:
            ConfigError: if it is gone.
        """
        found = self._objects.get(number)
        if found is None:
            raise ConfigError(
                f"a compiled program uses {self._what} number {number} of a sharded model that is gone, or that lived "
                "in another process; compile the model again, and keep it for as long as the program runs"
            )
        return found
