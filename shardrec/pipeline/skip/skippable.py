"""Modules with a forward that stashes tensors for later layers, and pops tensors of earlier layers.

::

    class Encode(nn.Module)   @skippable(stash=["a"])      class Decode(nn.Module)   @skippable(pop=["a"])

        def forward(self, x):                                  def forward(self, x):
            yield stash("a", x)   ───────── "a" ─────────►         a = yield pop("a")
            return self.layer(x)                                   return self.layer(torch.cat([x, a], 1))

The interface is torchgpipe's (Kim et al., 2020). Its users change an import.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import nn

from shardrec.errors import ConfigError, PipelineError
from shardrec.pipeline.skip.tracker import Namespace, SkipKey, current_skip_tracker


@dataclass(frozen=True, slots=True)
class stash:
    """What a skippable's forward yields to hand a value on: ``yield stash(name, tensor)``.

    Args:
        name: declared in ``@skippable(stash=[...])``.
        tensor: a tensor, None, a ``LazyAwaitable`` (waited for when it is popped or sent), or a nest of tensors.
    """

    name: str
    tensor: object


@dataclass(frozen=True, slots=True)
class pop:
    """What a skippable's forward yields to get a value: ``tensor = yield pop(name)``.

    Args:
        name: declared in ``@skippable(pop=[...])``.
    """

    name: str


class Skippable(nn.Module):
    """A module with skips. Base of the classes that :func:`skippable` makes.

    Args:
        args: of the decorated class.
        kwargs: of the decorated class.

    Attributes:
        module_cls: the class that was decorated.
        stashable_names: names that its forward stashes.
        poppable_names: names that its forward pops.
        module: the decorated class's object.
        namespaces: per isolated name.
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def namespaced(self, name: str) -> SkipKey:
        """The name with the namespace that it is isolated in, None if in none."""
        return self.namespaces.get(name), name

    def stashable(self) -> Iterator[SkipKey]:
        """The stashed names with their namespaces, in order of the name."""
        return map(self.namespaced, sorted(self.stashable_names))

    def poppable(self) -> Iterator[SkipKey]:
        """The popped names with their namespaces, in order of the name."""
        return map(self.namespaced, sorted(self.poppable_names))

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Put this module's skips into a namespace, apart from equal names in others.

        Args:
            ns: the module on the other end of the skip needs the same one.
            only: names to isolate. Default: all that the module declares. Others stay where they are.

        Returns:
            The module itself.

        Raises:
            TypeError: if ``only`` is a string.
            ConfigError: if ``only`` has a name that the module does not declare.
        """
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else _names(only, "only")
        unknown = sorted(names - declared)
        if unknown:
            raise ConfigError(
                f"{self._kind}.isolate(only={unknown}): {self._kind} declares {sorted(declared)}. Give names of these"
            )
        self.namespaces.update(dict.fromkeys(names, ns))
        return self

    def dispatch(
        self, input: object, handle_stash: Callable[[str, object], None], handle_pop: Callable[[str], object]
    ) -> object:
        """Run the decorated forward and answer what it yields.

        Args:
            input: of the forward.
            handle_stash: called with name and value of each ``yield stash(...)``.
            handle_pop: called with the name of each ``yield pop(...)``. Its result is the value of the yield.

        Returns:
            The forward's output. A forward that is not a generator is let through.

        Raises:
            TypeError: if the forward yields something else.
        """
        running = self.module(input)
        if not isinstance(running, Generator):
            return running
        answer: object = None
        try:
            while True:
                try:
                    asked = running.send(answer)
                except StopIteration as end:
                    return end.value
                if isinstance(asked, stash):
                    handle_stash(asked.name, asked.tensor)
                    answer = None
                elif isinstance(asked, pop):
                    answer = handle_pop(asked.name)
                else:
                    raise TypeError(
                        f"{self._kind}.forward yielded {type(asked).__name__}: a skippable's forward yields "
                        "stash(name, tensor) and pop(name), and returns its output"
                    )
                # Not kept here: what was stashed is for whoever pops it.
                del asked
        finally:
            running.close()

    def forward(self, input: object) -> object:
        """The decorated forward, its skips saved to and loaded from the current tracker.

        Raises:
            PipelineError: for a stash or pop that is not declared or made twice, a pop of a name that was not stashed,
                and for a declared stash or pop that did not happen.
        """
        tracker = current_skip_tracker()
        stashed: set[str] = set()
        popped: set[str] = set()

        def note(name: str, declared: frozenset[str], done: set[str], word: str) -> SkipKey:
            if name not in declared:
                raise PipelineError(
                    f"{self._kind}.forward yielded {word}({name!r}), which is not declared: write "
                    f"@skippable({word}={sorted(declared | {name})}), or leave it out"
                )
            if name in done:
                raise PipelineError(
                    f"{self._kind}.forward yielded {word}({name!r}) twice: a skip is stashed once and popped once"
                )
            done.add(name)
            return self.namespaced(name)

        def handle_stash(name: str, value: object) -> None:
            tracker.save(note(name, self.stashable_names, stashed, "stash"), value)

        def handle_pop(name: str) -> object:
            key = note(name, self.poppable_names, popped, "pop")
            try:
                return tracker.load(key)
            except KeyError:
                raise PipelineError(
                    f"{self._kind}.forward popped {name!r}, which no earlier layer has stashed"
                    + (" in that namespace" if key[0] else "")
                    + ": put the layer that stashes it before this one, and isolate both in the same namespace"
                ) from None

        output = self.dispatch(input, handle_stash, handle_pop)
        for word, left in (("stash", self.stashable_names - stashed), ("pop", self.poppable_names - popped)):
            if left:
                names = ", ".join(map(repr, sorted(left)))
                raise PipelineError(
                    f"{self._kind} declares {word} of {names}, and its forward ended without: yield {word}(...) on "
                    f"every path{', with None where there is no tensor,' if word == 'stash' else ''} or do not declare "
                    "it"
                )
        return output

    @property
    def _kind(self) -> str:
        return self.module_cls.__name__


def skippable(stash: Sequence[str] = (), pop: Sequence[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Class decorator for a module with skips.

    Its forward takes one input (a tensor, or a tuple), yields ``stash(name, tensor)`` and ``pop(name)`` for each name
    once, and returns its output. State dict keys begin with ``module.``, as torchgpipe's do. mypy does not follow what
    a class decorator returns: write ``Layer = skippable(...)(LayerModule)``, or ask ``isinstance(layer, Skippable)``.

    Args:
        stash: names that the forward stashes.
        pop: names that the forward pops.

    Returns:
        The decorator. It makes a subclass of :class:`Skippable`.

    Raises:
        TypeError: if names are not a list of strings, or if the decorated class is not an ``nn.Module``.
        ConfigError: if a list has a name twice.
    """
    stashable_names, poppable_names = _names(stash, "stash"), _names(pop, "pop")

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
            raise TypeError(f"@skippable decorates an nn.Module class, and not {module_cls!r}")
        names = {
            "module_cls": module_cls,
            "stashable_names": stashable_names,
            "poppable_names": poppable_names,
            "__module__": module_cls.__module__,
            "__qualname__": module_cls.__qualname__,
            "__doc__": module_cls.__doc__,
        }
        decorated = type(module_cls.__name__, (Skippable,), names)
        # Where pickle finds the class now: its own name is the decorated class's.
        module_cls.__qualname__ += ".module_cls"
        return decorated

    return decorate


def _names(argument: Iterable[str], what: str) -> frozenset[str]:
    if isinstance(argument, str):
        raise TypeError(f"{what}={argument!r}: give a list of names, such as [{argument!r}]")
    names = list(argument)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{what}={names!r}: {name!r} is a {type(name).__name__}, and skip names are strings")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{what}={names!r}: {', '.join(map(repr, twice))} is there twice. Give each name once")
    return frozenset(names)
