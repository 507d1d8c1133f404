"""``FeatureSpec``: what the columns of a data set are, and how each becomes a model's input.

As a YAML file::

    label: {column: rating, above: 3.5}      # or a column of 0 and 1
    group: session                           # rows that are ranked against each other. May be left out
    event_time: at                           # when what a row of a feed tells happened. May be left out
    features:
      - {name: user, kind: id, rows: 100_000}                       # any text or number, hashed
      - {name: country, kind: id, vocabulary: [de, fr, it], dim: 4} # a row for each value; 4 columns
      - {name: shop, kind: id, vocabulary: from_data, min_count: 2} # for each that the training rows have twice
      - {name: age, kind: id, boundaries: [18, 30, 50]}             # a number, by bucket
      - {name: genres, kind: multi_hot, rows: 50, separator: "|"}   # a list, or a text of several
      - {name: history, kind: sequence, share: video, max_length: 50}   # the table of feature video
      - {name: tags, kind: weighted, rows: 1000, weights: scores}   # a weight for each id, in another column
      - {name: video, kind: id, rows: 100_000, dynamic_ids: {evict: lfu, admit_after: 2}}   # no two ids share a row
      - {name: price, kind: dense, transform: log}

In place of ``label``, several tasks (:class:`~shardrec.trainer.data.tasks.Task`), and a column of the rows' weights::

    labels:
      - {name: click}
      - {name: minutes, kind: regression, loss: huber, optional: true}
    weight: importance

Row 0 per table is for a missing or unknown value; with dynamic ids, a missing value is the id -2^63.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator, model_validator

from shardrec import ConfigError, DynamicIds
from shardrec.files import read_json, read_text
from shardrec.trainer.data.schema import ClickSchema, criteo_schema
from shardrec.trainer.data.tasks import Task
from shardrec.trainer.yaml_files import parse_yaml

Kind = Literal["id", "multi_hot", "weighted", "sequence", "dense"]
Ids = Literal["hash", "number", "vocabulary", "buckets", "hexadecimal"]

_FROM_DATA = "from_data"
"""What stands for a vocabulary that is counted in the rows to train on."""

VOCABULARIES = "vocabularies.json"
"""The file beside a spec that has its counted vocabularies: the values of each feature, by its name."""

IDS = "ids.json"
"""The file beside a run's spec that says how values became ids: the version of the rules, and each table's spelling."""

FIRST_IDS: Mapping[str, Any] = {"rules": 1, "spelling": {}}
"""What :data:`IDS` would say of a run that has none: texts are ids as they are written."""

_CONSTANT = "constant"
"""Name of the dense column of ones that data without dense columns have, for models that need one."""


_OF_TABLE = ("rows", "ids", "vocabulary", "min_count", "boundaries", "dynamic_ids", "dim", "spelling")
"""What a feature says of its table, and one that shares another's does not."""

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Label(_Strict):
    """The label: a column of 0 and 1, or whether a number is above a limit.

    Attributes:
        column: its name in the files.
        above: labels are 1 for numbers above this. None for columns of 0 and 1.
    """

    column: str = "label"
    above: FiniteFloat | None = None


class Feature(_Strict):
    """One feature.

    Attributes:
        name: in the model. A key of the ``KeyedJaggedTensor``, or a dense column.
        kind: ``id`` (one a row), ``multi_hot`` (any number), ``weighted`` (with a weight each), ``sequence`` (in order)
            or ``dense`` (a number).
        column: name in the files. Default: ``name``.
        rows: of the table, row 0 included, into which ids are hashed; or, with ``ids="number"``, more than any id.
        ids: how values become rows: ``hash``; ``number``, as they are; by ``vocabulary``; by ``buckets``; or
            ``hexadecimal``, numbers of up to 16 digits modulo the rows. Default: what the other settings say.
        vocabulary: values that have a row each. Others have row 0. ``from_data``: those of the rows to train on.
        min_count: times that a value occurs at least to be in a vocabulary from data. Default: 1.
        dim: columns of the table. Default: what the model's ``dim`` says.
        share: another feature whose table this one looks up, with its rows, vocabulary and so on.
        boundaries: of buckets of a number, ascending. A date or time is the days since 1970-01-01, here and if dense.
        dynamic_ids: settings of a :class:`shardrec.DynamicIds`: values become 64-bit ids, to which the table's rows are
            given as they come. A whole number is its own id, a text its hash; with ``ids="hexadecimal"``, its number.
        spelling: of hashed ids and a vocabulary's: ``numbers``, where the text ``7.0`` is the number 7, or ``texts``,
            where it is a text, as of versions. Default: decided by all training values, and recorded in the run.
        between: of a list of whole numbers, as of libFM's text, those from the first of two to below the second.
        separator: between the ids in a text.
        weights: column of the weights of ``weighted`` ids.
        max_length: of a sequence. The last ids are kept.
        transform: of a dense number x: ``log`` is log(max(x, -1) + 3), and 0 for a missing one. ``none`` leaves it.
        mean: is subtracted after the transform.
        std: what is divided by, then.
    """

    name: str = Field(min_length=1)
    kind: Kind
    column: str = ""
    rows: int | None = Field(default=None, ge=2, lt=2**31)
    ids: Ids | None = None
    vocabulary: tuple[str, ...] | Literal["from_data"] | None = None
    min_count: int | None = Field(default=None, ge=1)
    dim: int | None = Field(default=None, ge=1)
    share: str | None = None
    boundaries: tuple[FiniteFloat, ...] | None = Field(default=None, min_length=1)
    dynamic_ids: DynamicIds | None = None
    spelling: Literal["numbers", "texts"] | None = None
    between: tuple[int, int] | None = None
    separator: str = Field(default="|", min_length=1)
    weights: str | None = None
    max_length: int | None = Field(default=None, ge=1)
    transform: Literal["log", "none"] = "none"
    mean: FiniteFloat = 0.0
    std: FiniteFloat = Field(default=1.0, gt=0)

    @field_validator("vocabulary", mode="before")
    @classmethod
    def _texts(cls, value: object) -> object:
        """YAML reads words such as ``1`` and ``no`` as other types, and of the second what was written is lost."""
        if not isinstance(value, (list, tuple)):
            return value
        for word in value:
            if word is None or isinstance(word, bool):
                raise ValueError(f"{word} is what YAML makes of words such as no, on and null: put them in quotes")
        return tuple(map(str, value))

    @model_validator(mode="before")
    @classmethod
    def _shares(cls, fields: object) -> object:
        if isinstance(fields, dict) and fields.get("share") is not None:
            for name in _OF_TABLE:
                if fields.get(name) is not None:
                    raise ValueError(f"{name} is that of the feature whose table it shares: leave it out")
        return fields

    @model_validator(mode="after")
    def _fits(self) -> Feature:
        row_fields = [name for name in ("rows", "vocabulary", "boundaries") if getattr(self, name) is not None]
        if "." in self.name:
            raise ValueError("a feature's name cannot have a '.': give another one, and column: for the files' name")
        of_table = [name for name in _OF_TABLE if getattr(self, name) is not None]
        if self.kind == "dense" and (of_table or self.share):
            raise ValueError(f"a dense feature has no {(*of_table, 'share')[0]}: leave it out, or give kind: id")
        if self.kind != "dense" and self.share is None and len(row_fields) != 1:
            raise ValueError(
                "give one of rows, vocabulary and boundaries, which say how many rows its table has, or share: FEATURE "
                "for the table of another feature"
            )
        if self.vocabulary == ():
            raise ValueError("the vocabulary is empty: give values, or from_data")
        if self.min_count is not None and self.vocabulary != _FROM_DATA:
            raise ValueError("min_count is for vocabulary: from_data")
        if (self.kind == "weighted") != (self.weights is not None):
            raise ValueError("weights names the column of a weighted feature's weights, and of no other's")
        if self.spelling is not None and self.coding not in ("hash", "vocabulary"):
            raise ValueError("spelling is for hashed ids and vocabularies: leave it out")
        if self.between is not None and (self.kind not in ("id", "multi_hot") or self.between[0] >= self.between[1]):
            raise ValueError("between is [FIRST, END] of whole numbers, for kind: id and kind: multi_hot")
        if self.max_length is not None and self.kind != "sequence":
            raise ValueError("max_length is for a sequence")
        if self.boundaries is not None and list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError("boundaries must ascend")
        if len(set(self.values)) < len(self.values):
            raise ValueError("the vocabulary has a value twice")
        needs = {"vocabulary": "vocabulary", "buckets": "boundaries"}
        if self.ids is not None and needs.get(self.ids, "rows") not in row_fields:
            raise ValueError(f"ids: {self.ids} needs {needs.get(self.ids, 'rows')}")
        if self.dynamic_ids is not None and (self.rows is None or self.coding == "number"):
            raise ValueError("dynamic_ids needs rows, and takes ids as texts or numbers: leave ids: number out")
        return self

    @property
    def source(self) -> str:
        """Its column in the files."""
        return self.column or self.name

    @property
    def values(self) -> tuple[str, ...]:
        """Its vocabulary, as far as it is known."""
        return self.vocabulary if isinstance(self.vocabulary, tuple) else ()

    @property
    def is_list(self) -> bool:
        """Whether a row has any number of ids."""
        return self.kind in ("multi_hot", "weighted", "sequence")

    @property
    def coding(self) -> Ids:
        """How values become rows."""
        if self.ids is not None:
            return self.ids
        return "vocabulary" if self.vocabulary else "buckets" if self.boundaries else "hash"

    @property
    def missing_id(self) -> int:
        """The id of a missing value."""
        return 0 if self.dynamic_ids is None else -(2**63)

    @property
    def num_embeddings(self) -> int:
        """Rows of its table.

        Raises:
            ConfigError: if its vocabulary is to be counted.
        """
        if self.vocabulary == _FROM_DATA:
            raise ConfigError(
                f"feature {self.name!r} has a vocabulary from data, which has not been counted: shardrec train counts "
                f"it and keeps it as {VOCABULARIES} in the run's folder. Use the spec there, or copy that file beside "
                "this spec"
            )
        if self.vocabulary is not None:
            return len(self.values) + 1
        if self.boundaries is not None:
            return len(self.boundaries) + 2
        assert self.rows is not None, "checked above"
        return self.rows


class FeatureSpec(_Strict):
    """What the columns of a data set are.

    Attributes:
        label: the label.
        labels: tasks, in the order in which a model's output has their columns, in place of ``label``.
        weight: with ``labels``, the column of the rows' weights in the losses: numbers of at least 0.
        group: column of texts or whole numbers. Rows with the same value (a user's, a query's, a session's) are ranked
            against each other by the ranking losses and metrics. None for none.
        event_time: column of when what a row of a feed tells happened: a date and time, in UTC if it has no zone, or a
            number of seconds since 1970-01-01, or of milliseconds from 10^11 on, which seconds reach in the year 5138.
        features: dense ones and those with tables, in the order in which the model has them.
        columns: of text files without a header line. None where the first line is the header.
        delimiter: of text files, such as ``;`` or ``::``. Default: a comma in ``.csv`` files, else a tab.
        quoted: whether fields of text files may be in double quotes.
        encoding: of text files, by its name in Python.
        decimal: what stands before the fraction of a number in text files.
        missing: texts that stand for a missing value, as the empty text does.
        rules: version of the rules by which values become ids; 1 is that of runs that recorded none.
    """

    label: Label = Label()
    labels: tuple[Task, ...] = ()
    weight: str | None = Field(default=None, min_length=1)
    group: str | None = Field(default=None, min_length=1)
    event_time: str | None = Field(default=None, min_length=1)
    features: tuple[Feature, ...]
    columns: tuple[str, ...] | None = None
    delimiter: str | None = Field(default=None, min_length=1)
    quoted: bool = True
    encoding: str = "utf-8"
    decimal: Literal[".", ","] = "."
    missing: tuple[str, ...] = ("NA", "NULL", r"\N", "nan", "NaN")
    rules: Literal[1, 2] = 2

    @field_validator("label", mode="before")
    @classmethod
    def _label(cls, value: object) -> object:
        return {"column": value} if isinstance(value, str) else value

    @field_validator("encoding")
    @classmethod
    def _encoding(cls, value: str) -> str:
        try:
            return codecs.lookup(value).name
        except LookupError as error:
            raise ValueError(f"there is no encoding {value!r}: give the name of one that Python knows") from error

    @field_validator("features")
    @classmethod
    def _with_tables(cls, features: tuple[Feature, ...]) -> tuple[Feature, ...]:
        """Features that share a table, with what the other feature says of it."""
        owners = {feature.name: feature for feature in features if feature.kind != "dense" and feature.share is None}
        for feature in features:
            if feature.share is not None and feature.share not in owners:
                raise ValueError(
                    f"feature {feature.name!r} shares the table of {feature.share!r}, and no feature of that name has "
                    f"a table of its own; those that have are {', '.join(owners) or 'none'}"
                )
        return tuple(
            feature
            if feature.share is None
            else feature.model_copy(update={name: getattr(owners[feature.share], name) for name in _OF_TABLE})
            for feature in features
        )

    @model_validator(mode="after")
    def _fits(self) -> FeatureSpec:
        if not self.sparse:
            raise ValueError("no feature has a table: give one of kind id, multi_hot, weighted or sequence")
        repeated = sorted(name for name, count in Counter(task.name for task in self.labels).items() if count > 1)
        if repeated:
            raise ValueError(f"labels has the name {repeated[0]!r} twice: rename a task")
        if self.labels and "label" in self.model_fields_set:
            raise ValueError("label and labels are given: leave one out")
        if self.weight is not None and not self.labels:
            raise ValueError("weight is for labels: give labels: [{name: NAME, kind: binary}] in place of label")
        if not self.uncounted:
            self.schema_  # noqa: B018  # checks the names
        missing = [name for name in self.sources if self.columns is not None and name not in self.columns]
        if missing:
            raise ValueError(f"columns lacks {', '.join(map(repr, missing))}")
        return self

    @cached_property
    def dense(self) -> tuple[Feature, ...]:
        """The dense features."""
        return tuple(feature for feature in self.features if feature.kind == "dense")

    @cached_property
    def sparse(self) -> tuple[Feature, ...]:
        """Those with tables."""
        return tuple(feature for feature in self.features if feature.kind != "dense")

    @cached_property
    def uncounted(self) -> tuple[Feature, ...]:
        """Those whose vocabulary is to be counted, each table's first."""
        return tuple(feature for feature in self.sparse if feature.vocabulary == _FROM_DATA and feature.share is None)

    def with_vocabularies(self, vocabularies: Mapping[str, Sequence[str]]) -> FeatureSpec:
        """The spec with counted vocabularies, by feature, in place of ``from_data``.

        Raises:
            ConfigError: if one is missing or empty.
        """
        lacking = [feature.name for feature in self.uncounted if not vocabularies.get(feature.name)]
        if lacking:
            raise ConfigError(
                f"no value of feature {', '.join(map(repr, lacking))} is in the vocabulary counted in the data: lower "
                "min_count, or give rows"
            )
        owned = {
            feature.name: {"vocabulary": tuple(map(str, vocabularies[feature.name])), "min_count": None}
            for feature in self.uncounted
        }
        return self._with(owned)

    @cached_property
    def undecided(self) -> tuple[Feature, ...]:
        """Those whose spelling is to be decided by their values."""
        codings = ("hash", "vocabulary") if self.rules > 1 else ()
        return tuple(feature for feature in self.sparse if feature.spelling is None and feature.coding in codings)

    def as_texts(self, feature: Feature) -> bool:
        """Whether texts such as ``7.0`` are ids of a feature as they are written."""
        return feature.spelling == "texts" or self.rules == 1

    def with_ids(self, recorded: Mapping[str, Any]) -> FeatureSpec:
        """The spec with :func:`recorded_ids` of a run: its rules and, by table, its spellings."""
        rules = {} if recorded["rules"] == 2 else {"rules": 1, "missing": ()}
        return self._with({name: {"spelling": spelling} for name, spelling in recorded["spelling"].items()}, **rules)

    def _with(self, of_tables: Mapping[str, Mapping[str, object]], **changes: object) -> FeatureSpec:
        """The spec with other settings, and with others of the features of some tables, by the first feature's name."""
        features = [
            feature.model_copy(update=of_tables.get(feature.share or feature.name, {})) for feature in self.features
        ]
        settings = {name: getattr(self, name) for name in self.model_fields_set}
        return FeatureSpec.model_validate({**settings, **changes, "features": tuple(features)})

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The columns of the files that are read, each once: the labels' first."""
        of_rows = filter(None, (self.group, self.event_time))
        return tuple(dict.fromkeys([*self.label_sources, *of_rows, *self.feature_sources]))

    @cached_property
    def feature_sources(self) -> tuple[str, ...]:
        """The columns of the features."""
        return sources_of((*self.dense, *self.sparse))

    @cached_property
    def list_sources(self) -> tuple[str, ...]:
        """The columns of any number of ids a row, and of their weights."""
        return sources_of([feature for feature in self.sparse if feature.is_list])

    @cached_property
    def number_sources(self) -> tuple[str, ...]:
        """The columns of features that are numbers: dense ones, those in buckets, and weights."""
        features = [feature for feature in self.features if feature.kind == "dense" or feature.boundaries is not None]
        weights = [feature.weights for feature in self.features if feature.weights is not None]
        return (*(feature.source for feature in features), *weights)

    @cached_property
    def forms(self) -> Mapping[str, Literal["ids", "numbers", "texts"]]:
        """How a converted file has the columns: ``ids`` as int64 if all are whole numbers, ``numbers`` also as float64,
        and else as ``texts``, which lists and hexadecimal numbers always are."""
        texts = {*self.list_sources, *(feature.source for feature in self.sparse if feature.coding == "hexadecimal")}
        ids = {self.group, *(feature.source for feature in self.sparse if feature.coding != "buckets")}
        return {name: "texts" if name in texts else "ids" if name in ids else "numbers" for name in self.sources}

    @cached_property
    def label_sources(self) -> tuple[str, ...]:
        """The columns of the label or the tasks, and of the rows' weights."""
        names = [task.source for task in self.labels] or [self.label.column]
        return (*names, *([self.weight] if self.weight else []))

    @property
    def weighs_labels(self) -> bool:
        """Whether rows differ in what they count for a task's loss."""
        return self.weight is not None or any(task.optional for task in self.labels)

    @cached_property
    def schema_(self) -> ClickSchema:
        """Names and table sizes, for models."""
        return ClickSchema(
            dense_names=tuple(feature.name for feature in self.dense) or (_CONSTANT,),
            sparse_names=tuple(feature.name for feature in self.sparse),
            num_embeddings=tuple(feature.num_embeddings for feature in self.sparse),
            weighted=any(feature.kind == "weighted" for feature in self.sparse),
            outputs=tuple(task.outputs for task in self.labels) or (1,),
            dims=tuple(feature.dim for feature in self.sparse),
            tables=tuple(f"t_{feature.share or feature.name}" for feature in self.sparse),
        )


def sources_of(features: Sequence[Feature]) -> tuple[str, ...]:
    """The columns of some features, and of their weights."""
    return tuple(column for feature in features for column in (feature.source, feature.weights) if column is not None)


def load_spec(path: Path) -> FeatureSpec:
    """A spec from a YAML file, with what :data:`VOCABULARIES` and :data:`IDS` beside it say, if they are there.

    Raises:
        ConfigError: naming file, feature and field of each fault.
    """
    spec, vocabularies, ids = read_spec(path), path.with_name(VOCABULARIES), path.with_name(IDS)
    if ids.is_file():
        try:
            spec = spec.with_ids(read_json(ids))
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{ids} does not say how values become ids ({error}): copy it from the run") from error
    if not spec.uncounted or not vocabularies.is_file():
        return spec
    try:
        return spec.with_vocabularies(read_json(vocabularies))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{vocabularies} has no lists of values by feature ({error}): delete it") from error


def recorded_ids(spec: FeatureSpec) -> dict[str, Any]:
    """What :data:`IDS` says of a spec: the version of the rules, and the spelling per table that has one."""
    spelling = {feature.name: feature.spelling for feature in spec.sparse if feature.spelling and not feature.share}
    return {"rules": spec.rules, "spelling": spelling}


def read_spec(path: Path) -> FeatureSpec:
    """:func:`load_spec` without the vocabularies from data."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"features (--features) is {path}, which cannot be read ({error}): give a YAML file"
        ) from error
    return parse_spec(text, str(path))


def parse_spec(text: str, where: str) -> FeatureSpec:
    """:func:`load_spec` of a file that has been read."""
    data, _ = parse_yaml(text, where)
    if not isinstance(data, dict):
        raise ConfigError(f"{where} has no label and features (shardrec inspect --suggest DATA proposes them)")
    try:
        return FeatureSpec.model_validate(data)
    except ValidationError as error:
        faults = [
            _place(fault["loc"], data)
            + (_unknown_key(fault["loc"]) if fault["type"] in _UNKNOWN else fault["msg"].removeprefix("Value error, "))
            for fault in error.errors()
        ]
        raise ConfigError(f"{where}: " + "; ".join(faults)) from error


def _place(loc: tuple[int | str, ...], data: Mapping[str, object]) -> str:
    """``features.2.rows`` of what a file has given, as the feature's name and the field."""
    words = [str(part) for part in loc]
    if len(loc) > 1 and loc[0] in ("features", "labels") and isinstance(loc[1], int):
        items = data[str(loc[0])]
        item = items[loc[1]] if isinstance(items, list) else None
        name = item.get("name", loc[1]) if isinstance(item, dict) else loc[1]
        words = [f"{'feature' if loc[0] == 'features' else 'label'} {name!r}", *words[2:]]
    return f"{', '.join(words)}: " if words else ""


def _unknown_key(loc: tuple[int | str, ...]) -> str:
    """What is said of a key that there is none of: the nearest one, and all."""
    models: dict[str, type[BaseModel]] = {"label": Label, "labels": Task}
    holder = FeatureSpec if len(loc) == 1 else models.get(str(loc[0]), Feature)
    known = [*(DynamicIds.__dataclass_fields__ if "dynamic_ids" in loc else holder.model_fields)]
    close = "".join(f", did you mean {key!r}?" for key in get_close_matches(str(loc[-1]), known, n=1))
    return f"there is no such key{close} (the keys are {', '.join(known)})"


def click_spec(schema: ClickSchema) -> FeatureSpec:
    """The spec of files in Criteo's format: tabs, no header, label, counts, hexadecimal categories.

    Args:
        schema: names and table sizes. Parquet files have the names, with ``label``.
    """
    features = [Feature(name=name, kind="dense", transform="log") for name in schema.dense_names]
    features += [
        Feature(name=name, kind="id", ids="hexadecimal", rows=rows)
        for name, rows in zip(schema.sparse_names, schema.num_embeddings, strict=True)
    ]
    columns = ("label", *schema.dense_names, *schema.sparse_names)
    return FeatureSpec(features=tuple(features), columns=columns, delimiter="\t", quoted=False)


def criteo_spec(*, max_embeddings: int = 100_000) -> FeatureSpec:
    """The spec of the Criteo Kaggle files. See :func:`shardrec.trainer.data.criteo_schema`."""
    return click_spec(criteo_schema(max_embeddings=max_embeddings))
