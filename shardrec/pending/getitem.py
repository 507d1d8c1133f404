"""Items of a pending collection, as pending values."""

from __future__ import annotations

from functools import partial
from typing import Any, Generic, TypeVar, cast

from shardrec.pending.awaitable import Chained, LazyAwaitable

__all__ = ["GetItemLazyAwaitable", "LazyGetItemMixin"]

W = TypeVar("W")
ParentW = TypeVar("ParentW")
KT = TypeVar("KT")
VT_co = TypeVar("VT_co", covariant=True)

_MAX_KEYS = 8  # in a message


class LazyGetItemMixin(Generic[KT, VT_co]):
    """Makes ``lazy[key]`` an awaitable of the item, without waiting for the collection.

    For awaitables of keyed collections, such as ``KeyedTensor`` or ``dict``: a model can select its features before the
    collective that delivers them has ended. A missing key raises at the first use of the item.

    List it before ``LazyAwaitable`` among the bases, so that its ``__getitem__`` takes precedence::

        class FeaturesAwaitable(LazyGetItemMixin[str, Tensor], LazyAwaitable[KeyedTensor]): ...

    The idea and the interface are TorchRec's ``torchrec.distributed.types.LazyGetItemMixin``.
    """

    def __getitem__(self, key: KT) -> LazyAwaitable[VT_co]:
        return GetItemLazyAwaitable(cast("LazyAwaitable[Any]", self), key)


class GetItemLazyAwaitable(Chained[W], Generic[W, ParentW, KT]):
    """The item of a pending collection.

    Args:
        parent: the awaitable of the collection.
        key: key or index of the item.

    Raises:
        KeyError, IndexError: at the first use, if the collection has no such item; the message lists its keys.
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
    more = f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
    return f"; it has {', '.join(keys[:_MAX_KEYS]) or 'none'}{more}"
