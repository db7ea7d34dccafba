"""Dataclasses of options, the flags of their fields, and checks of the options that were given.

    @dataclasses.dataclass(frozen=True)
    class SampleOptions:
        sample: int = option(0, "Bytes to generate after training", least=0)

    flags = define_flags(SampleOptions)  # absl's --sample
    options = flags.read()  # A SampleOptions, after the command line is parsed.

An option counts as given if its value differs from the default, so the checks need no command line.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from absl import flags

from tfdist.launch.flags.values import UsageError

_Options = TypeVar("_Options")

_DEFINITIONS: dict[type, Callable[..., Any]] = {
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    tuple: flags.DEFINE_list,
    str: flags.DEFINE_string,
}
_KEY = "option"


@dataclasses.dataclass(frozen=True)
class _Option:
    """The properties of a flag that a field does not have; see `option`."""

    help: str
    least: float | None
    most: float | None
    choices: Sequence[str] | None
    shown: Any
    is_repeated: bool
    former: str | None


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Iterable[str] | None = None,
    shown: Any = None,
    is_repeated: bool = False,
    former: str | None = None,
) -> Any:
    """Define a field of a dataclass of options, whose annotation is the type of its flag.

    `int | str` is a number, or the word "auto".

    Args:
        default: The default value.
        help: The explanation in the help.
        least: Lower bound of a number.
        most: Upper bound of a number.
        choices: The possible words, if not all are.
        shown: The default value in the help, for a default of None.
        is_repeated: Whether a tuple has one value per flag, instead of a list with commas.
        former: A former name of the flag, which still works.
    """
    chosen = None if choices is None else tuple(choices)
    properties = _Option(help, least, most, chosen, shown, is_repeated, former)
    return dataclasses.field(default=default, metadata={_KEY: properties})


@dataclasses.dataclass(frozen=True)
class Flags(Generic[_Options]):
    """The flags of a dataclass of options.

    Attributes:
        options: The dataclass.
        values: The flags of the program, of which these are some.
    """

    options: type[_Options]
    values: flags.FlagValues

    def read(self) -> _Options:
        """The options of the command line, after it is parsed."""
        return _read(self.options, self.values)


def _read(options: Any, values: flags.FlagValues) -> Any:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        if (subject := _subject(field)) is not None:
            found[field.name] = _read(subject, values)
        elif values[field.name].present:
            value = values[field.name].value
            found[field.name] = tuple(value) if isinstance(value, list) else value
    return options(**found)


def define_flags(
    options: type[_Options], values: flags.FlagValues | None = None
) -> Flags[_Options]:
    """Define a flag for each option of a dataclass, in the order of its fields.

    A field whose default factory is another dataclass of options represents the flags of that one.

    Args:
        options: The dataclass.
        values: The flags to add them to; None for those of a new program.
    """
    values = flags.FlagValues() if values is None else values
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(typing.cast(Any, options)):
        if (subject := _subject(field)) is not None:
            define_flags(subject, values)
        else:
            _define(field, hints[field.name], values)
    return Flags(options, values)


def _define(field: dataclasses.Field, hint: Any, values: flags.FlagValues) -> None:
    its: _Option = field.metadata[_KEY]
    parts = [hint, *typing.get_args(hint)]
    parts += [typing.get_origin(part) for part in parts]
    kind = next(kind for kind in _DEFINITIONS if kind in parts)
    default: Any = field.default if its.shown is None else its.shown
    bounds: dict[str, Any] = (
        {"lower_bound": its.least, "upper_bound": its.most} if kind in (int, float) else {}
    )
    if its.is_repeated:
        flags.DEFINE_multi_string(field.name, None, its.help, flag_values=values)
        values[field.name].help = f"{its.help}; may be repeated"
    elif its.choices is not None:
        flags.DEFINE_enum(field.name, default, list(its.choices), its.help, flag_values=values)
    elif kind is int and str in parts:
        flags.DEFINE(
            _CountParser(**bounds),
            field.name,
            default,
            its.help,
            flag_values=values,
            serializer=flags.ArgumentSerializer[Any](),
        )
    else:
        default = list(default) if isinstance(default, tuple) else default
        _DEFINITIONS[kind](field.name, default, its.help, flag_values=values, **bounds)
    if its.former is not None:
        flags.DEFINE_alias(its.former, field.name, flag_values=values)


class _CountParser(flags.IntegerParser):
    """Parse a number within bounds, or "auto"."""

    def parse(self, argument: Any) -> Any:
        return argument if argument == "auto" else super().parse(argument)


def _subject(field: dataclasses.Field) -> Any:
    """The dataclass of options that a field nests; None for an option."""
    factory = field.default_factory
    return None if factory is dataclasses.MISSING else factory


def names(options: Any, *, without: Iterable[str] = ()) -> tuple[str, ...]:
    """The names of the options of a dataclass, with those of nested ones."""
    found: list[str] = []
    for field in dataclasses.fields(options):
        subject = _subject(field)
        found += [field.name] if subject is None else names(subject)
    return tuple(name for name in found if name not in without)


def as_given(options: Any, names: Iterable[str]) -> str:
    """Those of the named options that differ from their defaults, as the flags that set them."""
    given = _given(options)
    return " ".join(given[name] for name in names if name in given)


def refuse_ignored(options: Any, names: Iterable[str], why: str, received: str) -> None:
    """Reject options that would be ignored with `received`; `why` is the predicate of the message.

    Raises:
        UsageError: One of the named options differs from its default.
    """
    given = _given(options)
    for name in names:
        if name in given:
            raise UsageError(f"--{name} {why}. Received: {given[name]} {received}.")


def _given(options: Any) -> dict[str, str]:
    """By name, the flags of options that differ from their defaults."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if _subject(field) is not None:
            found |= _given(value)
        elif value != field.default:
            found[field.name] = _as_flags(field, value)
    return found


def _as_flags(field: dataclasses.Field, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{field.name}" if value else f"--no{field.name}"
    if field.metadata[_KEY].is_repeated:
        return " ".join(f"--{field.name}={each}" for each in value)
    return f"--{field.name}={','.join(value) if isinstance(value, tuple) else value}"
