"""The operator table: one declaration for each ATen operator that becomes loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, TypeAlias, TypeVar

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


class Exact(Enum):
    """Where a kernel computes, bit for bit, what eager does."""

    NOWHERE = auto()  # what is not said is not so
    INTEGERS = auto()  # where no element is a float: the order does not matter
    WIDE = auto()  # where no element is of half precision
    HALVES = auto()  # where all floats are of half precision, every number having been tried
    BF16 = auto()  # the same of bfloat16 alone
    EVERYWHERE = auto()

    def holds(self, dtypes: Iterable[DType]) -> bool:
        """Whether it does for elements of these types."""
        floats = [dtype for dtype in dtypes if dtype.is_float]
        match self:
            case Exact.NOWHERE:
                return False
            case Exact.INTEGERS:
                return not floats
            case Exact.WIDE:
                return all(dtype.computed_in is dtype for dtype in floats)
            case Exact.HALVES:
                return bool(floats) and all(dtype.computed_in is not dtype for dtype in floats)
            case Exact.BF16:
                return bool(floats) and all(dtype is DType.BF16 for dtype in floats)
            case Exact.EVERYWHERE:
                return True


# By types alone, or a function of the types and the operator's own arguments.
ExactWhere: TypeAlias = Exact | Callable[..., bool]

# Beside the operators: what is said of their kernels.  Views compute nothing.
EXACT: Final[dict[Any, ExactWhere]] = {}


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An operator that computes each element of its result from one element of each input."""

    target: Any
    body: Callable[..., Expr]
    promotion: Promotion


POINTWISE: Final[dict[Any, Pointwise]] = {}


def pointwise(
    *targets: Any,
    promotion: Promotion = Promotion.RESULT,
    takes: Takes = Takes.ANYTHING,
    exact: ExactWhere = Exact.NOWHERE,
) -> Callable[[Callable[..., Expr]], Callable[..., Expr]]:
    """Declare a pointwise operator; the function is its formula.

    It is called as `formula(b, *args, **kwargs)` with the operator's own arguments: tensors are
    expressions of the type that `promotion` says, numbers stand as they are, None is None.  It
    raises NotImplementedError for arguments that stay with torch.  `exact` says where it gives
    eager's own bits, half precision being rounded after each operator.
    """

    def register(body: Callable[..., Expr]) -> Callable[..., Expr]:
        for target in targets:
            if target in POINTWISE:
                raise ValueError(f"{target} is declared twice")
            POINTWISE[target] = Pointwise(target, _taking(takes, body), promotion)
            EXACT[target] = exact
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


def lowers(*targets: Any, exact: ExactWhere = Exact.NOWHERE) -> Callable[[_Rule], _Rule]:
    """Declare how an operator becomes loops, and where they give eager's own bits."""
    return _register(RULES, targets, exact)


def view(*targets: Any) -> Callable[[_Rule], _Rule]:
    """Declare how a view maps its points to those of its source."""
    return _register(VIEW_RULES, targets, Exact.EVERYWHERE)


def _register(
    table: dict[Any, Callable[..., Any]], targets: tuple[Any, ...], exact: ExactWhere
) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        for target in targets:
            if target in POINTWISE or target in RULES or target in VIEW_RULES:
                raise ValueError(f"{target} is declared twice")
            table[target] = rule
            EXACT[target] = exact
        return rule

    return register
