"""Passes of users': which stage they join, and where in its list.

    stator.passes.register("joint", my_pass, after="drop_casts")

A pass is a function of a graph and a context that returns how many changes it made, a rule, or a
`PatternPass`.  What it does is part of every cache key: its source is, or the `version` it has.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch

from stator.errors import OptionError
from stator.torch_api import OpOverload

if TYPE_CHECKING:  # a warm start asks for versions, and needs nothing else
    from stator.graph.run import GraphPass

STAGES: Final = ("pre_grad", "joint", "post_grad")


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """A pass of a user's.  `remove()` takes it out again."""

    stage: str
    pass_: GraphPass
    before: str | None
    after: str | None
    version: str | None

    def remove(self) -> None:
        """Leave it out of what is compiled from now on."""
        if self in _registered:
            _registered.remove(self)


_registered: list[Registered] = []


def register(
    stage: str,
    pass_: Any,
    *,
    before: str | None = None,
    after: str | None = None,
    version: str | None = None,
) -> Registered:
    """Have a pass run in a stage: before or after one that it names, or else last."""
    if stage not in STAGES:
        raise OptionError(f"unknown stage {stage!r}", hint=f"there are: {', '.join(STAGES)}")
    if before is not None and after is not None:
        raise OptionError("a pass stands before or after another", hint="give one of the two")
    if not callable(pass_) or not hasattr(pass_, "__name__"):
        raise OptionError(f"{pass_!r} is no pass", hint="give a function of a graph and a context")
    if any(known.pass_.__name__ == pass_.__name__ for known in _registered):
        raise OptionError(
            f"there is a pass {pass_.__name__!r} already", hint="remove() it, or rename this one"
        )
    found = Registered(stage, pass_, before, after, version)
    _registered.append(found)
    return found


def with_registered(stage: str, own: Sequence[GraphPass]) -> tuple[GraphPass, ...]:
    """A stage's passes, with those of users' in their places."""
    passes = list(own)
    for one in _registered:
        if one.stage != stage:
            continue
        names = [pass_.__name__ for pass_ in passes]
        wanted = one.before or one.after
        if wanted is not None and wanted not in names:
            raise OptionError(
                f"pass {one.pass_.__name__!r} stands by {wanted!r}, which {stage} does not have",
                hint=f"there are: {', '.join(names)}",
            )
        place = len(passes) if wanted is None else names.index(wanted) + (one.before is None)
        passes.insert(place, one.pass_)
    return tuple(passes)


def registered_versions() -> list[str] | None:
    """What identifies the passes of users', in their order; None if one cannot be told."""
    found = []
    for one in _registered:
        version = one.version or _source_hash(one.pass_)
        if version is None:
            return None
        place = f"{one.before} {one.after}"
        found.append(f"{one.stage} {one.pass_.__name__} {place} {version}")
    return found


def _source_hash(pass_: Any) -> str | None:
    """What a pass does, from its functions: those it is made of, or itself."""
    made_of = getattr(pass_, "functions", None) or [pass_]
    found = [_identity(function) for function in made_of]
    return None if None in found else " ".join(map(str, found))


def _identity(function: Any) -> str | None:
    """The source of the module that a function is from, and what it closes over.

    None for what that does not tell: an object with a state of its own, a function without source.
    """
    if not isinstance(function, FunctionType):
        return None
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    texts = [_identity(one) if isinstance(one, FunctionType) else _text(one) for one in held]
    try:
        module = inspect.getmodule(function)
        source = inspect.getsource(function if module is None else module)
    except (OSError, TypeError):
        return None
    if None in texts:
        return None
    whole = "\0".join([function.__qualname__, source, *map(str, texts)])
    return hashlib.sha256(whole.encode()).hexdigest()


def _text(value: Any) -> str | None:
    plain = (bool, int, float, complex, str, bytes, type(None), torch.dtype, OpOverload)
    if isinstance(value, list | tuple):
        parts = [_text(item) for item in value]
        return None if None in parts else str(parts)
    return repr(value) if isinstance(value, plain) else None
