"""Options of a run as one pydantic model: the command line and the YAML reader are made from its fields."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails

from shardrec import ConfigError
from shardrec.trainer.yaml_files import parse_yaml


class Shown(NamedTuple):
    """How an option is shown in the help.

    Attributes:
        annotation: its type.
        default: its value if it is not given.
        panel: the heading that it is under.
        help: for people, in one line.
        metavar: stands for the value.
        choices: values that there are, of texts and lists of texts. Empty if others can be given.
    """

    annotation: object
    default: object
    panel: str
    help: str
    metavar: str | None
    choices: tuple[str, ...]


def option(
    default: object, *, key: str | None = None, help: str | None = None, metavar: str | None = None, **limits: Any
) -> Any:
    """A field of :class:`Options`, where its type and its default do not say all.

    Args:
        default: its value if it is not given. ``...`` if it decides whether there is its group.
        key: its name for people. Default: the field's name.
        help: for people. Default: the field's docstring.
        metavar: stands for the value in the help. Default: the choices.
        limits: of a number, as pydantic's ``Field`` takes them.
    """
    return Field(default, alias=key, description=help, json_schema_extra={"metavar": metavar}, **limits)


class OptionGroup(BaseModel):
    """Frozen options. Text that spells a value, as YAML files and shells have it, is that value.

    A field's docstring is its help, a ``Literal`` its choices. A field may be a group itself, of one of several classes
    (a tagged union), or optional. Its options are given by their keys, beside those of the group around it. An option
    that the chosen class lacks, or of an optional group without its required ones, can only have its default.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
    panel: ClassVar[str] = ""

    def structural_faults(self) -> Iterable[str]:
        """Why options that are well-formed do not go together, a sentence each."""
        return ()

    @classmethod
    @cache
    def groups(cls) -> Mapping[str, list[type[OptionGroup]]]:
        """The fields that are groups, with the classes that each may have."""
        kinds = {name: [*_groups(field.annotation)] for name, field in cls.model_fields.items()}
        return {name: classes for name, classes in kinds.items() if classes}

    @classmethod
    @cache
    def options(cls) -> Mapping[str, Shown]:
        """How the help shows each option, also of the groups inside, by its key."""
        groups, options = cls.groups(), dict[str, Shown]()
        for name, field in cls.model_fields.items():
            for group in groups.get(name, ()):
                options |= group.options()
            if name in groups:
                continue
            kinds = (field.annotation, *get_args(field.annotation))
            choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
            holder = next(base for base in reversed(cls.__mro__) if name in getattr(base, "model_fields", ()))
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            options[field.alias or name] = Shown(
                annotation=field.annotation,
                default=None if field.is_required() else field.default,
                panel=getattr(holder, "panel", ""),
                help=" ".join((field.description or "").split()),
                metavar=str(extra.get("metavar") or "|".join(choices)) or None,
                choices=choices,
            )
        return options

    def flat(self) -> dict[str, object]:
        """The options of this group and of the groups inside that there are, as JSON-compatible data."""
        groups = self.groups()
        flat = self.model_dump(mode="json", by_alias=True, exclude={*groups})
        for group in filter(None, (getattr(self, name) for name in groups)):
            flat |= group.flat()
        return flat

    @model_validator(mode="before")
    @classmethod
    def _grouped(cls, options: dict[str, object]) -> dict[str, object]:
        """The options of groups, moved from beside the groups into them."""
        groups = cls.groups()
        homes = {key: name for name, kinds in groups.items() for kind in kinds for key in kind.options()}
        values = dict[str, Any]({name: {} for name in groups if cls.model_fields[name].is_required()})
        for key, value in options.items():
            (values.setdefault(homes[key], {}) if key in homes else values)[key] = value
        return values

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


class Options(OptionGroup):
    """The groups of options together, or options without groups, each base class a ``panel`` of the help.

    Raises:
        ConfigError: naming each option that cannot be honoured, its value and the valid values.
    """

    def __init__(self, **values: object) -> None:
        others = {name: value for name, value in values.items() if not self._is_default(name, value)}
        try:
            super().__init__(**others)
        except ValidationError as error:
            raise ConfigError(_explained(error, values, type(self))) from None
        faults = [*_faults(self)]
        if faults:
            raise ConfigError(together(faults))

    @classmethod
    def _is_default(cls, name: str, value: object) -> bool:
        option = cls.options().get(name)
        return option is not None and json.dumps(value, default=str) == json.dumps(option.default)

    def changed(self, **changes: object) -> Self:
        """These options with other values for some."""
        return type(self)(**{**self.to_mapping(), **changes})

    def to_mapping(self) -> dict[str, object]:
        """The options by their keys, without groups, as YAML- and JSON-compatible data, which make equal options as
        keywords. Of groups that there are not, the defaults."""
        flat, options = self.flat(), self.options()
        return {
            name: flat[name] if name in flat else json.loads(json.dumps(option.default))
            for name, option in options.items()
        }


def _groups(annotation: object) -> Iterator[type[OptionGroup]]:
    if isinstance(annotation, type) and issubclass(annotation, OptionGroup):
        yield annotation
    for part in get_args(annotation):
        yield from _groups(part)


def _faults(options: OptionGroup) -> Iterator[str]:
    yield from options.structural_faults()
    for group in filter(None, (getattr(options, name) for name in options.groups())):
        yield from _faults(group)


def named_values(value: object) -> dict[str, object]:
    """A mapping as it is; of texts ``NAME=VALUE`` a mapping, with the values as YAML reads them.

    Raises:
        ValueError: for a text of another form.
    """
    if isinstance(value, Mapping):
        return dict(value)
    texts = value if isinstance(value, (list, tuple)) else [value]
    pairs = [str(text).partition("=") for text in texts]
    if any(not name or not equals for name, equals, _ in pairs):
        raise ValueError("give NAME=VALUE, such as dropout=0.1")
    return {name.strip(): parse_yaml(text, f"the value of {name}")[0] for name, _, text in pairs}


def _joined(item: object) -> str:
    return ",".join(map(str, item)) if isinstance(item, (list, tuple)) else str(item)


def _explained(error: ValidationError, values: Mapping[str, object], options: type[Options]) -> str:
    """Each option that is wrong, its value and the valid values."""
    faults: dict[str, str] = {}
    known = options.options()
    for fault in error.errors():
        name = next((part for part in reversed(fault["loc"]) if part in known), fault["loc"][0])
        faults.setdefault(str(name), _sentence(str(name), fault, values, known))
    names = "" if faults.keys() <= known.keys() else f"\nThe options are {', '.join(known)}"
    return together([*faults.values()]) + names


def _sentence(name: str, fault: ErrorDetails, values: Mapping[str, object], known: Mapping[str, Shown]) -> str:
    named, kind, loc = f"{name} ({flag(name)})", fault["type"], fault["loc"]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        return f"{named} is not an option" + (f": did you mean {close[0]!r}?" if close else "")
    if kind == "missing":
        others = " and ".join(f"{other} ({flag(other)}) is {value!r}" for other, value in fault["input"].items())
        return f"{others}, without {named}: give both, or neither"
    shown = f"{named} is {values.get(name, fault['input'])!r}"
    if kind == "extra_forbidden":  # of one of several classes of a group, whose tag says why
        return f"{shown}, and {loc[0]} ({flag(str(loc[0]))}) is {loc[1]}: leave it out"
    wanted = fault["msg"].removeprefix("Value error, ")
    wanted = wanted.replace("Input should", "each should" if isinstance(loc[-1], int) else "it should")
    if kind == "literal_error":
        wanted = f"give one of {', '.join(known[name].choices)}"
    return f"{shown}: {wanted}"


def together(faults: list[str]) -> str:
    """One fault as a sentence, several as a numbered list."""
    if len(faults) == 1:
        return faults[0]
    lines = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(faults, 1))
    return f"the options have {len(faults)} faults:\n{lines}"


def flag(name: str) -> str:
    """The command line's spelling of an option. One of several arguments is given at a time."""
    return "--" + name.replace("_", "-").replace("args", "arg")
