"""Hash-consing: equal values are one object, so that comparing and hashing them costs nothing."""

from __future__ import annotations

from dataclasses import MISSING
from typing import Any
from weakref import WeakValueDictionary

_table: WeakValueDictionary[Any, Any] = WeakValueDictionary()

# 1, 1.0 and True are equal, and so are 0.0 and -0.0, but they are not the same constant; NaN is not
# equal to itself, but is.
_NUMBERS = frozenset({int, float, bool})


class Interned(type):
    """Metaclass of frozen dataclasses (`eq=False`) whose equal instances are identical."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(cls.__match_args__):  # type: ignore[attr-defined]  # dataclass
            args = _complete(cls, args, kwargs)
        key: Any = (cls, *args)
        for arg in args:
            if type(arg) in _NUMBERS:
                key = (cls, *((type(a), repr(a) if type(a) is float else a) for a in args))
                break
        found = _table.get(key)
        if found is None:
            found = super().__call__(*args)
            _table[key] = found
        return found


def _complete(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All fields of `cls` in order, defaults filled in."""
    values = list(args)
    for name in cls.__match_args__[len(args) :]:
        value = kwargs[name] if name in kwargs else cls.__dataclass_fields__[name].default
        if value is MISSING:
            raise TypeError(f"{cls.__name__} needs {name!r}")
        values.append(value)
    return tuple(values)
