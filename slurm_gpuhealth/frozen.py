"""Frozen value classes without the import cost of `dataclasses`.

`import dataclasses` pulls in `inspect` and `re` and costs as much CPU as starting Python itself; a program
that runs on every node every minute can't afford it. `@frozen` gives the part that we use: positional and
keyword construction, defaults, equality, hash, repr, no assignment. Type checkers see a frozen dataclass.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    from typing_extensions import dataclass_transform

    T = TypeVar("T")
else:

    def dataclass_transform(**_):
        return lambda function: function


@dataclass_transform(frozen_default=True)
def frozen(cls: type[T]) -> type[T]:
    """Make `cls` a frozen value: its annotations, in order, are its fields; class attributes are defaults."""
    fields = tuple(cls.__annotations__)
    defaults = {name: cls.__dict__[name] for name in fields if name in cls.__dict__}
    allowed = frozenset(fields)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(fields):
            raise TypeError(f"{cls.__name__} takes {len(fields)} values, got {len(args)}")
        values = {**defaults, **dict(zip(fields, args)), **kwargs}
        if values.keys() != allowed or not kwargs.keys().isdisjoint(fields[: len(args)]):
            wrong = sorted(values.keys() ^ allowed) or sorted(kwargs.keys() & set(fields[: len(args)]))
            raise TypeError(f"{cls.__name__}: missing, unknown or repeated: {', '.join(wrong)}")
        self.__dict__.update((name, values[name]) for name in fields)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        raise AttributeError(f"{cls.__name__} is frozen: use replace(value, {name}=...)")

    def __eq__(self: Any, other: object) -> Any:
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(tuple(self.__dict__.values()))

    def __repr__(self: Any) -> str:
        return f"{cls.__name__}({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"

    for method in (__init__, __setattr__, __eq__, __hash__, __repr__):
        setattr(cls, method.__name__, method)
    return cls


def replace(value: T, **changes: Any) -> T:
    """A copy of the frozen `value` with some fields changed."""
    return type(value)(**{**value.__dict__, **changes})


def asdict(value: object) -> dict[str, Any]:
    """The fields of `value`, nested frozen values included, as plain dictionaries."""
    return {k: asdict(v) if hasattr(v, "__dict__") else v for k, v in value.__dict__.items()}
