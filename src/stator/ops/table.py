"""The operator table: one declaration for each ATen operator that becomes loops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, TypeVar

from stator.core.dtypes import DType
from stator.loops.ir import Expr

_Rule = TypeVar("_Rule", bound=Callable[..., Any])


class Promotion(Enum):
    """In which type an operator computes."""

    RESULT = auto()  # the result's
    ROUNDED = auto()  # the result's; numbers are rounded to it, in half precision too
    INPUTS = auto()  # the one that torch promotes the inputs to: comparisons
    NONE = auto()  # each argument keeps its own (half precision is widened)


class Takes(Enum):
    """Elements that eager has an operator for; of others it raises, and so it shall."""

    ANYTHING = auto()
    NUMBERS = auto()  # no bools
    FLOATS = auto()
    BITS = auto()  # integers and bools

    def has(self, dtype: DType) -> bool:
        """Whether elements of the type are among them."""
        match self:
            case Takes.FLOATS:
                return dtype.is_float
            case Takes.BITS:
                return not dtype.is_float
            case Takes.NUMBERS:
                return dtype is not DType.BOOL
            case Takes.ANYTHING:
                return True


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An operator that computes each element of its result from one element of each input."""

    target: Any
    body: Callable[..., Expr]
    promotion: Promotion


POINTWISE: Final[dict[Any, Pointwise]] = {}


def pointwise(
    *targets: Any, promotion: Promotion = Promotion.RESULT, takes: Takes = Takes.ANYTHING
) -> Callable[[Callable[..., Expr]], Callable[..., Expr]]:
    """Declare a pointwise operator; the function is its formula.

    It is called as `formula(b, *args, **kwargs)` with the operator's own arguments: tensors are
    expressions of the type that `promotion` says, numbers stand as they are, None is None.  It
    raises NotImplementedError for arguments that stay with torch.
    """

    def register(body: Callable[..., Expr]) -> Callable[..., Expr]:
        for target in targets:
            if target in POINTWISE:
                raise ValueError(f"{target} is declared twice")
            POINTWISE[target] = Pointwise(target, _taking(takes, body), promotion)
        return body

    return register


def _taking(takes: Takes, body: Callable[..., Expr]) -> Callable[..., Expr]:
    """The formula, refusing elements that eager has no operator for."""

    @functools.wraps(body)
    def formula(b: Any, *args: Any, **kwargs: Any) -> Expr:
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, Expr) and not takes.has(arg.dtype):
                raise NotImplementedError(f"no operator for {arg.dtype!r}: eager raises")
        return body(b, *args, **kwargs)

    return body if takes is Takes.ANYTHING else formula


# Called as rule(builder, result, *args, **kwargs): tensors are Values, the rest stands as it is.
# None as an answer: these arguments stay with torch.
RULES: Final[dict[Any, Callable[..., Any]]] = {}

# Rules for views: they read their source elsewhere, and compute nothing.
VIEW_RULES: Final[dict[Any, Callable[..., Any]]] = {}


def lowers(*targets: Any) -> Callable[[_Rule], _Rule]:
    """Declare how an operator becomes loops."""
    return _register(RULES, targets)


def view(*targets: Any) -> Callable[[_Rule], _Rule]:
    """Declare how a view maps its points to those of its source."""
    return _register(VIEW_RULES, targets)


def _register(
    table: dict[Any, Callable[..., Any]], targets: tuple[Any, ...]
) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        for target in targets:
            if target in POINTWISE or target in RULES or target in VIEW_RULES:
                raise ValueError(f"{target} is declared twice")
            table[target] = rule
        return rule

    return register
