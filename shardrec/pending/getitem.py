"""Items of a value that is on its way, themselves on their way."""

from __future__ import annotations

from functools import partial
from typing import Any, Generic, TypeVar, cast

from shardrec.pending.awaitable import Chained, LazyAwaitable

__all__ = ["GetItemLazyAwaitable", "LazyGetItemMixin"]

W = TypeVar("W")
ParentW = TypeVar("ParentW")
KT = TypeVar("KT")
VT_co = TypeVar("VT_co", covariant=True)

_MOST_KEYS = 8  # in a message


class LazyGetItemMixin(Generic[KT, VT_co]):
    """Makes ``lazy[key]`` an awaitable of the item, without waiting for the collection.

    For awaitables of keyed collections, such as ``KeyedTensor`` or ``dict``: a model can take its features apart before
    the collective that brings them has ended. A key that is not there shows at the first use of the item.

    It comes before ``LazyAwaitable`` among the bases, so that its ``__getitem__`` is the one that is found::

        class FeaturesAwaitable(LazyGetItemMixin[str, Tensor], LazyAwaitable[KeyedTensor]): ...

    The idea and the interface are TorchRec's ``torchrec.distributed.types.LazyGetItemMixin``.
    """

    def __getitem__(self, key: KT) -> LazyAwaitable[VT_co]:
        return GetItemLazyAwaitable(cast("LazyAwaitable[Any]", self), key)


class GetItemLazyAwaitable(Chained[W], Generic[W, ParentW, KT]):
    """The item of an awaited collection.

    Args:
        parent: the awaitable of the collection.
        key: what the collection is asked for.

    Raises:
        KeyError, IndexError: at the first use, if the collection has no such item; with the keys that it has.
    """

    def __init__(self, parent: LazyAwaitable[ParentW], key: KT) -> None:
        super().__init__(partial(_item, key, type(parent).__name__), parent)


def _item(key: Any, parent: str, collection: Any) -> Any:
    try:
        return collection[key]
    except (KeyError, IndexError) as error:
        text = f"{type(collection).__name__} of {parent} has no item {key!r}"
        raise type(error)(text + _its_keys(collection)) from error


def _its_keys(collection: Any) -> str:
    if not callable(getattr(collection, "keys", None)):
        return f"; its length is {len(collection)}" if hasattr(collection, "__len__") else ""
    keys = list(map(repr, collection.keys()))
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return f"; it has {', '.join(keys[:_MOST_KEYS]) or 'none'}{more}"
