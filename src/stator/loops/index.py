"""Integer algebra over axes and size symbols: sums of products, floor division, modulo.

An index is a polynomial with integer coefficients.  Its atoms are axes (0 <= axis < size), symbols
for sizes known at run time (>= 0 unless signed), and quotients, remainders and clamped numbers that
did not simplify.  All is exact: no rule depends on a guess, so an index means the same before and
after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations
from math import gcd
from typing import Any, Final, TypeAlias

from stator.core.interning import Interned
from stator.loops.prims import Prim


@dataclass(frozen=True, eq=False)
class Axis(metaclass=Interned):
    """A loop counter, from 0 to below `size`.  Text form: `i0`."""

    name: str
    size: Index

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Symbol(metaclass=Interned):
    """A size known at run time; signed: a number that may be negative.  Text form: `s0`."""

    name: str
    is_signed: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Quotient(metaclass=Interned):
    """Floor division by a positive number.  Text form: `(i0 // 3)`."""

    value: Index
    by: Index

    def __str__(self) -> str:
        return f"({_operand(self.value)} // {_operand(self.by)})"


@dataclass(frozen=True, eq=False)
class Remainder(metaclass=Interned):
    """What floor division leaves.  Text form: `(i0 % 3)`."""

    value: Index
    by: Index

    def __str__(self) -> str:
        return f"({_operand(self.value)} % {_operand(self.by)})"


@dataclass(frozen=True, eq=False)
class Clamped(metaclass=Interned):
    """max(low, min(value, high)), where low <= high.  Text form: `clamp(s0 - 1, 0, s1)`."""

    value: Index
    low: Index
    high: Index

    def __str__(self) -> str:
        return f"clamp({self.value}, {self.low}, {self.high})"


@dataclass(frozen=True, eq=False)
class Element(metaclass=Interned):
    """An integer that the program computes: the index of a gather.  Text form: `[expr]`."""

    expr: Any  # loops.ir.Expr, which holds indices in turn

    def __str__(self) -> str:
        return f"[{self.expr}]"


# Layers repeat, and so does the arithmetic on their indices.
REMEMBERED: Final = 1 << 14
MOST_STEPS: Final = 32  # of a long division

Atom: TypeAlias = Axis | Symbol | Quotient | Remainder | Clamped | Element
Product: TypeAlias = tuple[Atom, ...]
Leaf: TypeAlias = Axis | Symbol


@dataclass(frozen=True, eq=False)
class Index(metaclass=Interned):
    """A sum of products with integer factors, in a fixed order."""

    terms: tuple[tuple[Product, int], ...] = ()

    @staticmethod
    def of(value: Index | Atom | int) -> Index:
        """`value` as an index."""
        return value if isinstance(value, Index) else _single(value)

    def __add__(self, other: Index | Atom | int) -> Index:
        return _added(self, other, 1)

    __radd__ = __add__

    def __neg__(self) -> Index:
        return _added(ZERO, self, -1)

    def __sub__(self, other: Index | Atom | int) -> Index:
        return _added(self, other, -1)

    def __rsub__(self, other: Index | Atom | int) -> Index:
        return Index.of(other) - self

    def __mul__(self, other: Index | Atom | int) -> Index:
        return _multiplied(self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Index | Atom | int) -> Index:
        return _divide(self, Index.of(other))[0]

    def __mod__(self, other: Index | Atom | int) -> Index:
        return _divide(self, Index.of(other))[1]

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        if not self.terms:
            return "0"
        text = ""
        for product, factor in self.terms:
            names = "*".join(str(atom) for atom in product)
            size = abs(factor)
            body = names if size == 1 and names else "*".join(filter(None, (str(size), names)))
            sign = "-" if factor < 0 else "+"
            text += f" {sign} {body}" if text else ("-" + body if factor < 0 else body)
        return text

    @cached_property
    def constant(self) -> int | None:
        """The number it is, if it is one."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    @cached_property
    def leaves(self) -> frozenset[Leaf]:
        """Axes and symbols it depends on, inside of quotients and computed indices as well."""
        return frozenset(
            leaf for product, _ in self.terms for atom in product for leaf in leaves_of(atom)
        )

    @cached_property
    def axes(self) -> frozenset[Axis]:
        """Axes it depends on."""
        return frozenset(leaf for leaf in self.leaves if isinstance(leaf, Axis))

    def factor_of(self, axis: Axis) -> Index | None:
        """What the index grows by when `axis` does by one; None if that is not constant."""
        found = ZERO
        for product, factor in self.terms:
            if axis not in product:
                if any(axis in leaves_of(atom) for atom in product):
                    return None
                continue
            rest = list(product)
            rest.remove(axis)
            if any(axis in leaves_of(atom) for atom in rest):
                return None
            found = found + Index(((tuple(rest), factor),))
        return found

    def replaced(self, values: Mapping[Leaf, Index], done: dict[Any, Any] | None = None) -> Index:
        """The index with axes or symbols replaced; `done`: what became of expressions so far."""
        if self.leaves.isdisjoint(values):
            return self
        total = ZERO
        for product, factor in self.terms:
            part = Index.of(factor)
            for atom in product:
                part = part * _replaced(atom, values, done)
            total = total + part
        return total


ZERO = Index()


def _operand(index: Index) -> str:
    number = index.constant
    stands_alone = only_atom(index) is not None or (number is not None and number >= 0)
    return str(index) if stands_alone else f"({index})"


def leaves_of(atom: Atom) -> frozenset[Leaf]:
    """Axes and symbols that an atom depends on."""
    match atom:
        case Axis() | Symbol():
            return frozenset({atom})
        case Quotient() | Remainder():
            return atom.value.leaves | atom.by.leaves
        case Clamped():
            return atom.value.leaves | atom.low.leaves | atom.high.leaves
        case Element():
            found: frozenset[Leaf] = atom.expr.leaves
            return found


def upper_bound(index: Index) -> Index | None:
    """A size-only index that it never exceeds; None if none is known."""
    return _bound(index, upper=True)


def lower_bound(index: Index) -> Index | None:
    """A size-only index that it never falls below; None if none is known."""
    return _bound(index, upper=False)


def clamped(value: Index, low: Index, high: Index) -> Index:
    """max(low, min(value, high)) of size-only indices with low <= high."""
    if is_at_least(low - value, 0):
        return low
    if is_at_least(value - high, 0):
        return high
    if is_at_least(value - low, 0) and is_at_least(high - value, 0):
        return value
    return Index.of(Clamped(value, low, high))


def is_at_least(index: Index, number: int) -> bool:
    """Whether a size-only index is known to reach `number`: sizes are at least 0."""
    rest: Index | None = index - number
    while rest is not None:
        if all(
            factor >= 0 and all(_is_natural(atom) for atom in product)
            for product, factor in rest.terms
        ):
            return True
        rest = _without_a_pair(rest) or _with_a_quotient_less(rest)
    return False


def _without_a_pair(index: Index) -> Index | None:
    """What `index` is at least: a // k - b // k >= (a - b) // k."""
    found = [(term, atom) for term in index.terms for atom in term[0] if isinstance(atom, Quotient)]
    for ((product, more), first), ((other, less), second) in permutations(found, 2):
        apart = (first.value - second.value).constant
        if more < 0 or less > 0 or first.by is not second.by or apart is None:
            continue
        common = _less(product, first)
        if first.by.constant and common == _less(other, second) and all(map(_is_natural, common)):
            many = min(more, -less)
            rest = index - Index(((product, many),)) + Index(((other, many),))
            return rest + Index(((common, many),)) * (apart // first.by.constant)
    return None


def _less(product: Product, atom: Atom) -> Product:
    """The product without one of its factors."""
    place = product.index(atom)
    return product[:place] + product[place + 1 :]


def _with_a_quotient_less(index: Index) -> Index | None:
    """What a multiple of `index` is at least: v - (k - 1) <= k*(v // k) <= v."""
    atoms = (atom for product, _ in index.terms for atom in product)
    quotient = next((a for a in atoms if isinstance(a, Quotient) and a.by.constant), None)
    if quotient is None:
        return None
    by, total = quotient.by, ZERO
    for product, factor in index.terms:
        if quotient not in product:
            total = total + Index(((product, factor),)) * by
            continue
        others = _less(product, quotient)
        if not all(map(_is_natural, others)):
            return None
        reached = quotient.value if factor < 0 else quotient.value - by + 1
        total = total + Index(((others, factor),)) * reached
    return total


def _is_natural(atom: Atom) -> bool:
    """Whether the atom is never negative."""
    if isinstance(atom, Clamped):
        return is_at_least(atom.low, 0)
    if isinstance(atom, Quotient):
        low = lower_bound(atom.value)
        return low is not None and is_at_least(low, 0)
    if isinstance(atom, Element):
        clamped_to = _clamped_to(atom.expr)
        return clamped_to is not None and clamped_to[0] >= 0
    return not (isinstance(atom, Symbol) and atom.is_signed)


@lru_cache(REMEMBERED)
def _bound(index: Index, *, upper: bool) -> Index | None:
    total = ZERO
    for product, factor in index.terms:
        part = Index.of(factor)
        for atom in product:
            limit = _atom_bound(atom, upper=upper == (factor > 0))
            if limit is None or (len(product) > 1 and not _is_natural(atom)):
                return None
            part = part * limit
        total = total + part
    return total


def _atom_bound(atom: Atom, *, upper: bool) -> Index | None:
    match atom:
        case Axis():
            return atom.size - 1 if upper else ZERO
        case Symbol():
            return Index.of(atom)
        case Remainder():
            return atom.by - 1 if upper else ZERO
        case Quotient():
            limit = _bound(atom.value, upper=upper)
            return None if limit is None else limit // atom.by
        case Clamped():
            if not upper:
                return atom.low
            # max(low, value) is a bound as well, and a number is the better one.
            whole = atom.value.constant is not None and is_at_least(atom.value - atom.low, 0)
            return atom.value if whole else atom.high
        case Element():
            clamped_to = _clamped_to(atom.expr)
            return None if clamped_to is None else Index.of(clamped_to[upper])


def _clamped_to(expr: Any) -> tuple[int, int] | None:
    """The bounds of max(min(x, high), low); None for other expressions."""
    if getattr(expr, "prim", None) is not Prim.MAX:
        return None
    inner, low = expr.args
    if getattr(inner, "prim", None) is not Prim.MIN:
        return None
    least, most = getattr(low, "value", None), getattr(inner.args[1], "value", None)
    if not isinstance(least, int) or not isinstance(most, int) or most < least:
        return None
    return least, most


@lru_cache(REMEMBERED)
def _single(value: Atom | int) -> Index:
    if isinstance(value, int):
        return Index((((), value),)) if value else ZERO
    return Index((((value,), 1),))


@lru_cache(REMEMBERED)
def _added(left: Index, right: Index | Atom | int, sign: int) -> Index:
    return _sum((*left.terms, *((p, sign * b) for p, b in Index.of(right).terms)))


@lru_cache(REMEMBERED)
def _multiplied(left: Index, right: Index | Atom | int) -> Index:
    others = Index.of(right).terms
    return _sum((_ordered(p + q), a * b) for p, a in left.terms for q, b in others)


def _sum(terms: Iterable[tuple[Product, int]]) -> Index:
    total: dict[Product, int] = {}
    for product, factor in terms:
        total[product] = total.get(product, 0) + factor
    _recombine(total)
    kept = [(product, factor) for product, factor in total.items() if factor]
    return Index(tuple(sorted(kept, key=lambda term: (-len(term[0]), [str(a) for a in term[0]]))))


def _recombine(total: dict[Product, int]) -> None:
    """c*by*(v // by) + c*(v % by)  -->  c*v, and what else `_partners` knows."""
    for product in list(total):
        for place, atom in enumerate(product):
            if not total[product] or not isinstance(atom, Remainder) or len(atom.by.terms) != 1:
                continue
            factor, others = total[product], product[:place] + product[place + 1 :]
            ((symbols, number),) = atom.by.terms
            for partner, joint in _partners(atom, total):
                other = _ordered((*partner, *symbols, *others))
                if total.get(other) != factor * number:
                    continue
                total[product] = total[other] = 0
                for part, scale in joint.terms:
                    joined = _ordered(part + others)
                    total[joined] = total.get(joined, 0) + scale * factor
                _recombine(total)  # the parts may meet others
                return


def _partners(atom: Remainder, total: Mapping[Product, int]) -> Iterator[tuple[Product, Index]]:
    """What stands beside v % by as a multiple of it, and what the two are together.

    by*(v // by) + v % by  -->  v
    by*((v // by + w) % n) + v % by  -->  (v + by*w) % (by*n)
    """
    quotient = atom.value // atom.by
    if len(quotient.terms) != 1 or quotient.terms[0][1] != 1:
        return
    yield quotient.terms[0][0], atom.value
    for outer in [outer for product in total for outer in product if isinstance(outer, Remainder)]:
        if quotient.terms[0] in outer.value.terms and outer.by.terms:
            value = atom.value + atom.by * (outer.value - quotient)
            yield (outer,), value % (atom.by * outer.by)


def _ordered(product: Product) -> Product:
    return tuple(sorted(product, key=str))


@lru_cache(REMEMBERED)
def _divide(value: Index, by: Index) -> tuple[Index, Index]:
    """Quotient and remainder; what is known to be whole comes out of the division."""
    if by.constant == 1:
        return value, ZERO
    if value.constant is not None and by.constant is not None:
        return Index.of(value.constant // by.constant), Index.of(value.constant % by.constant)
    whole, rest = _whole_and_rest(value, by)
    if _lies_below(rest, by):
        return whole, rest
    if not rest.terms:
        return whole, ZERO
    if by.terms:  # what divides by an empty size is never evaluated
        found = _by_parts(rest, by) or _of_a_remainder(rest, by) or _of_a_quotient(rest, by)
        if found is not None:
            return whole + found[0], found[1]
    return whole + Index.of(Quotient(rest, by)), Index.of(Remainder(rest, by))


def _lies_below(index: Index, limit: Index) -> bool:
    """Whether 0 <= index < limit is known."""
    high, low = upper_bound(index), lower_bound(index)
    if high is None or low is None:
        return False
    return is_at_least(low, 0) and is_at_least(limit - high, 1)


def _whole_and_rest(value: Index, by: Index) -> tuple[Index, Index]:
    """Two indices such that whole * by + rest is `value`."""
    if len(by.terms) > 1:
        return _long_division(value, by)
    whole, rest = ZERO, ZERO
    for product, factor in value.terms:
        quotient = _exact(product, factor, by)
        if quotient is None and not product and by.constant is not None:
            # So that x - 1 and x + 1, divided by 2, are of the same x.
            quotient, left = Index.of(factor // by.constant), factor % by.constant
            rest = rest + left
        if quotient is None:
            rest = rest + Index(((product, factor),))
        else:
            whole = whole + quotient
    return whole, rest


def _long_division(value: Index, by: Index) -> tuple[Index, Index]:
    """As polynomials are divided: i*(n + 1) + j by n + 1 is i, and leaves j."""
    lead = Index(by.terms[:1])  # no other term is of a higher degree
    whole, rest = ZERO, value
    for _ in range(MOST_STEPS):
        steps = (_exact(product, factor, lead) for product, factor in rest.terms)
        step = next((found for found in steps if found is not None), None)
        if step is None:
            break
        whole, rest = whole + step, rest - step * by
    return (whole, rest) if len(rest.terms) < len(value.terms) else (ZERO, value)


def _by_parts(value: Index, by: Index) -> tuple[Index, Index] | None:
    """Quotient and remainder where 0 <= b < c:

    (c*a + b) // (c*k)  -->  a // k
    (c*a + b) % (c*k)   -->  c*(a % k) + b
    """
    for common in _common_factors(value, by):
        coarse, fine = _whole_and_rest(value, common)
        if _lies_below(fine, common):
            quotient, left = _divide(coarse, by // common)
            return quotient, common * left + fine
    return None


def _common_factors(value: Index, by: Index) -> Iterator[Index]:
    """Divisors of `by` that terms of `value` have, the largest first.

    Each divides the one before, as terms join that have less in common with `by`.
    """
    shared = by.terms[0]
    for term in by.terms[1:]:
        shared = _common(shared, term)
    shared = tuple(atom for atom in shared[0] if _is_natural(atom)), shared[1]
    found = [_common(shared, term) for term in value.terms if term[0]]
    found.sort(key=lambda term: (len(term[0]), term[1]), reverse=True)
    last: tuple[Product, int] | None = None
    for term in found:
        common = term if last is None else _common(last, term)
        if common == ((), 1):
            return
        if common != last:
            yield Index((common,))
        last = common


def _common(one: tuple[Product, int], other: tuple[Product, int]) -> tuple[Product, int]:
    """The largest term that divides both."""
    left, atoms = list(other[0]), []
    for atom in one[0]:
        if atom in left:
            left.remove(atom)
            atoms.append(atom)
    return tuple(atoms), gcd(one[1], other[1])


def _of_a_remainder(value: Index, by: Index) -> tuple[Index, Index] | None:
    """Quotient and remainder where 0 <= b < c and `by` divides c*n:

    (c*(v % n) + b) // by  -->  ((c*v + b) // by) % (c*n // by)
    (c*(v % n) + b) % by   -->  (c*v + b) % by
    """
    for product, factor in value.terms:
        for atom in product:
            if not isinstance(atom, Remainder) or not atom.by.terms:
                continue
            scale = Index(((_less(product, atom), factor),))
            rest = value - scale * atom
            count, left = _divide(scale * atom.by, by)
            if left is ZERO and _lies_below(rest, scale):
                quotient, left = _divide(scale * atom.value + rest, by)
                return quotient % count, left
    return None


def _of_a_quotient(value: Index, by: Index) -> tuple[Index, Index] | None:
    """(v // a + w) // by  -->  (v + a*w) // (a*by), and what is left as it stands.

    Sizes stay as they are where there is a w: proofs compare what their quotients round.
    """
    for term in value.terms:
        atom = only_atom(Index((term,)))
        if not isinstance(atom, Quotient):
            continue
        rest = value - atom
        if not rest.terms or (value.axes and atom.by.constant and by.constant):
            whole = atom.value + atom.by * rest
            return whole // (atom.by * by), Index.of(Remainder(value, by))
    return None


def only_atom(index: Index) -> Atom | None:
    """The atom that an index is, if it is one."""
    if len(index.terms) != 1 or index.terms[0][1] != 1 or len(index.terms[0][0]) != 1:
        return None
    return index.terms[0][0][0]


def _exact(product: Product, factor: int, by: Index) -> Index | None:
    """The term divided by `by`, if that leaves nothing."""
    if len(by.terms) != 1:
        return None
    ((symbols, number),) = by.terms
    if factor % number:
        return None
    rest = list(product)
    for symbol in symbols:
        if symbol not in rest:
            return None
        rest.remove(symbol)
    return Index(((tuple(rest), factor // number),))


def _replaced(atom: Atom, values: Mapping[Leaf, Index], done: dict[Any, Any] | None) -> Index:
    match atom:
        case Axis() | Symbol():
            found = values.get(atom)
            return Index.of(atom) if found is None else found
        case Quotient():
            return atom.value.replaced(values, done) // atom.by.replaced(values, done)
        case Remainder():
            return atom.value.replaced(values, done) % atom.by.replaced(values, done)
        case Clamped():
            parts = (part.replaced(values, done) for part in (atom.value, atom.low, atom.high))
            return clamped(*parts)
        case Element():
            return Index.of(Element(atom.expr.replaced(values, done)))
