"""Options of a run as one pydantic model: the command line and the YAML reader are made from its fields."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from shardrec import ConfigError
from shardrec.trainer.yaml_files import parse_yaml

__all__ = ["Options", "Shown", "flag", "named_values", "option", "together"]


class Shown(NamedTuple):
    """How an option is shown in the help.

    Attributes:
        panel: the heading that it is under.
        help: for people, in one line.
        metavar: stands for the value.
        choices: values that there are, of texts and lists of texts. Empty if others can be given.
    """

    panel: str
    help: str
    metavar: str | None
    choices: tuple[str, ...]


def option(default: object, *, help: str | None = None, metavar: str | None = None, **limits: Any) -> Any:
    """A field of :class:`Options`, where its type and its default do not say all.

    Args:
        default: its value if it is not given.
        help: for people. Default: the field's docstring.
        metavar: stands for the value in the help. Default: the choices.
        limits: of a number, as pydantic's ``Field`` takes them.
    """
    return Field(default, description=help, json_schema_extra={"metavar": metavar}, **limits)


class Options(BaseModel):
    """Frozen options. Text that spells a value, as YAML files and shells have it, is that value.

    A field's docstring is its help, a ``Literal`` its choices. A subclass may put together several, each a ``panel`` of
    the help.

    Raises:
        ConfigError: naming each option that cannot be honoured, its value and the valid values.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
    panel: ClassVar[str] = ""

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explained(error, values, type(self))) from None
        faults = [*self.structural_faults()]
        if faults:
            raise ConfigError(together(faults))

    def structural_faults(self) -> Iterable[str]:
        """Why options that are well-formed do not go together, a sentence each."""
        return ()

    @classmethod
    def shown(cls, name: str) -> Shown:
        """How the help shows a field."""
        field = cls.model_fields[name]
        kinds = (field.annotation, *get_args(field.annotation))
        choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
        group = next(base for base in reversed(cls.__mro__) if name in getattr(base, "model_fields", ()))
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        return Shown(
            panel=getattr(group, "panel", ""),
            help=" ".join((field.description or "").split()),
            metavar=str(extra.get("metavar") or "|".join(choices)) or None,
            choices=choices,
        )

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: object, info: ValidationInfo) -> object:
        """A text or a mapping ``{"t_*": row_wise}`` for a list; a truth value is meant by none."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool):
            raise ValueError("give a number, or a text in quotes, for YAML reads on, off, yes and no as truth values")
        if get_origin(kind) is dict:
            return named_values(value)
        if get_origin(kind) is not tuple:
            return value
        if isinstance(value, Mapping):
            return [f"{key}={_joined(item)}" for key, item in value.items()]
        if isinstance(value, str) and get_args(kind)[0] is not str:
            return value.split(",")
        return [value] if isinstance(value, (str, int)) else value

    @field_validator("*")
    @classmethod
    def _is_some(cls, value: object) -> object:
        if "" in (value if isinstance(value, tuple) else (value,)):
            raise ValueError("give some text")
        return value

    def changed(self, **changes: object) -> Self:
        """These options with other values for some."""
        return self.of({**self.to_mapping(), **changes})

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Self:
        """Options from such data as :meth:`to_mapping` gives, or from texts."""
        return cls(**values)

    def to_mapping(self) -> dict[str, object]:
        """The options as YAML- and JSON-compatible data, which make equal options as keywords."""
        return self.model_dump(mode="json")


def named_values(given: object) -> dict[str, object]:
    """A mapping as it is; of texts ``NAME=VALUE`` a mapping, with the values as YAML reads them.

    Raises:
        ValueError: for a text of another form.
    """
    if isinstance(given, Mapping):
        return dict(given)
    texts = given if isinstance(given, (list, tuple)) else [given]
    pairs = [str(text).partition("=") for text in texts]
    if any(not name or not equals for name, equals, _ in pairs):
        raise ValueError("give NAME=VALUE, such as dropout=0.1")
    return {name.strip(): parse_yaml(text, f"the value of {name}")[0] for name, _, text in pairs}


def _joined(item: object) -> str:
    return ",".join(map(str, item)) if isinstance(item, (list, tuple)) else str(item)


def _explained(error: ValidationError, values: Mapping[str, object], options: type[Options]) -> str:
    """Each option that is wrong, its value and the valid values."""
    faults: dict[str, str] = {}
    known = [*options.model_fields]
    for fault in error.errors():
        name = str(fault["loc"][0])
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            text = f"{name} ({flag(name)}) is not an option" + (f": did you mean {close[0]!r}?" if close else "")
        else:
            wanted = fault["msg"].removeprefix("Value error, ")
            wanted = wanted.replace("Input should", "each should" if fault["loc"][1:] else "it should")
            if fault["type"] == "literal_error":
                wanted = f"give one of {', '.join(options.shown(name).choices)}"
            text = f"{name} ({flag(name)}) is {values[name]!r}: {wanted}"
        faults.setdefault(name, text)
    names = "" if faults.keys() <= set(known) else f"\nThe options are {', '.join(known)}"
    return together([*faults.values()]) + names


def together(faults: list[str]) -> str:
    """One fault as a sentence, several as a numbered list."""
    if len(faults) == 1:
        return faults[0]
    lines = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(faults, 1))
    return f"the options have {len(faults)} faults:\n{lines}"


def flag(name: str) -> str:
    """The command line's spelling of an option. One of several arguments is given at a time."""
    return "--" + name.replace("_", "-").replace("args", "arg")
