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
    template = {**dict.fromkeys(fields), **defaults}
    required = frozenset(fields) - defaults.keys()
    needed = max((place + 1 for place, name in enumerate(fields) if name in required), default=0)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        values = self.__dict__
        values.update(template)
        values.update(zip(fields, args))
        values.update(kwargs)
        given = fields[: len(args)]
        # Set operations on whole keys: a flooded kernel log makes 100,000 values.
        if len(values) != len(fields) or len(args) > len(fields) or not kwargs.keys().isdisjoint(given):
            wrong = sorted((kwargs.keys() - fields) | (kwargs.keys() & given)) or [f"value {len(fields) + 1}"]
            raise TypeError(f"{cls.__name__}: unknown, repeated or too many: {', '.join(wrong)}")
        if len(args) < needed and not required.issubset(kwargs.keys() | given):
            raise TypeError(f"{cls.__name__}: missing: {', '.join(sorted(required - kwargs.keys() - set(given)))}")

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
    """The fields of `value` as plain dictionaries, also those of nested frozen values."""
    return {k: asdict(v) if hasattr(v, "__dict__") else v for k, v in value.__dict__.items()}
