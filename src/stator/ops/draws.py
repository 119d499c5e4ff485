"""Random numbers as graphs hold them: pure functions of a seed and a stream.

`draw_seed` alone touches torch's generator, once a call of a graph and device.  The stream is the
number of the random node in its graph: Threefry makes a key of seed and stream, and then the bits
of each element from that key and the element's number in row-major order; where one word is enough
for an element, two neighbours share the two words of their half.  On a GPU, there, it is Philox: of
the seed, the stream and the number, four neighbours share the words of their quarter.  So the bits
depend neither on the layout nor on the threads, and a graph that goes on to draw more keeps what it
drew before.

The rules in `random.py` make loops of these functions.  Called, they compute the same with torch,
slowly: for where a graph runs without kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from stator.loops.philox import philox_one
from stator.loops.threefry import Words, threefry, threefry_one

WORD: Final = (1 << 32) - 1
SECOND_BLOCK: Final = 1 << 31  # in the counter's upper word: no tensor has that many elements

# Random bits of an element of [0, 1): as many as the type's significand holds, so that none of
# them rounds up to 1.
DIGITS: Final = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

Order: TypeAlias = Sequence[int] | None  # dimensions as they lie in memory; None: row-major


def draw_seed(device: torch.device | None = None) -> Tensor:
    """64 bits of torch's generator for a device (None: the CPU), as two words that lie there.

    Nobody waits for a GPU: kernels read the words from its memory.
    """
    return torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, device=device or _CPU)


_CPU: Final = torch.device("cpu")  # whatever torch.set_default_device says


def uniform(
    seed: Tensor,
    stream: int,
    bounds: tuple[float, float],
    size: Sequence[int],
    dtype: torch.dtype,
    order: Order = None,
) -> Tensor:
    """Numbers of [low, high)."""
    low, high = bounds
    part = _fractions(seed, stream, size, dtype)
    if (low, high) != (0, 1):
        part = (part * (high - low) + low).clamp(max=largest_below(high, low, DIGITS[dtype]))
    return _laid(part.to(dtype), order)


def normal(
    seed: Tensor, stream: int, size: Sequence[int], dtype: torch.dtype, order: Order = None
) -> Tensor:
    """Numbers of the standard normal distribution, by Box and Muller's formula."""
    if dtype is torch.float64:
        above_zero = _fractions(seed, stream, size, dtype) + 2.0**-54
        turn = _fractions(seed, stream, size, dtype, SECOND_BLOCK) - 0.5
    else:
        first, second = _words(seed, stream, size)
        above_zero = ((first >> 1).float() * 2.0**-31 + 2.0**-32).double()
        turn = _signed(second).double() * 2.0**-32
    radius = (-2 * above_zero.log()).sqrt()
    return _laid((radius * (2 * math.pi * turn).cos()).to(dtype), order)


def coins(
    seed: Tensor,
    stream: int,
    p: float | Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    order: Order = None,
) -> Tensor:
    """1 with probability p, else 0."""
    if isinstance(p, Tensor):
        kind = torch.float64 if p.dtype is torch.float64 else torch.float32
        is_head = _fractions(seed, stream, size, kind) < p
    else:
        is_head = _signed(_word(seed, stream, size)) < threshold(p)
    return _laid(is_head.to(dtype), order)


def integers(
    seed: Tensor,
    stream: int,
    bounds: tuple[int, int],
    size: Sequence[int],
    dtype: torch.dtype,
    order: Order = None,
) -> Tensor:
    """Integers of [low, high)."""
    low, high = bounds
    if low >= high:
        raise RuntimeError(EMPTY_RANGE)
    first, second = _words(seed, stream, size)
    below, above = high - low & WORD, high - low >> 32
    middle = second * below + (first * below >> 32 & WORD)
    number = middle >> 32 & WORD
    if above:
        number = number + second * above + (first * above + (middle & WORD) >> 32 & WORD)
    return _laid((number + low).to(dtype), order)


EMPTY_RANGE: Final = "random_ expects 'from' to be less than 'to'"


def require_between(value: Tensor, low: float, high: float, message: str) -> Tensor:
    """`value`; an error unless all of it is in [low, high]."""
    if not bool(((value >= low) & (value <= high)).all()):
        raise RuntimeError(message)
    return value


def threshold(p: float) -> int:
    """A random word, seen as signed, is below it with probability p."""
    return round(p * 2.0**32) - (1 << 31)


def largest_below(high: float, low: float, digits: int) -> float:
    """The largest number of so many digits that is below `high`, and not below `low`."""
    if low >= high:
        return high
    mantissa, exponent = math.frexp(math.nextafter(high, -math.inf))
    return max(math.ldexp(math.floor(math.ldexp(mantissa, digits)), exponent - digits), low)


def _words(seed: Tensor, stream: int, size: Sequence[int], block: int = 0) -> tuple[Tensor, Tensor]:
    """Two words for each element, in 64-bit integers."""
    seeded, number = _numbered(seed, size)
    key = threefry(seeded, (stream, 0))
    first, second = threefry(key, (number & WORD, number >> 32 ^ block))
    return first, second


def takes_philox(device: str) -> bool:
    """Whether tensors on such a device draw single words by Philox: on all but a CPU."""
    return device != "cpu"


def _word(seed: Tensor, stream: int, size: Sequence[int]) -> Tensor:
    """One word for each element, likewise."""
    key, number = _numbered(seed, size)
    words = number & WORD, number >> 32
    word: Tensor
    if takes_philox(seed.device.type):
        word = philox_one(key, stream, words)
    else:
        word = threefry_one(threefry(key, (stream, 0)), words)
    return word


def _numbered(seed: Tensor, size: Sequence[int]) -> tuple[Words, Tensor]:
    """The words of a seed, and the numbers of the elements."""
    below, above = (seed.long() & WORD).unbind()
    return (below, above), torch.arange(math.prod(size), device=seed.device).reshape(tuple(size))


def _fractions(
    seed: Tensor, stream: int, size: Sequence[int], dtype: torch.dtype, block: int = 0
) -> Tensor:
    """Numbers of [0, 1) in f32, or in f64 if that is the type."""
    digits = DIGITS[dtype]
    if dtype is not torch.float64:
        return (_word(seed, stream, size) >> 32 - digits).float() * 2.0**-digits
    first, second = _words(seed, stream, size, block)
    return ((second >> 11 << 32) + (first ^ 1 << 31)).double() * 2.0**-digits


def _signed(word: Tensor) -> Tensor:
    return word - (word >> 31 << 32)


def _laid(value: Tensor, order: Order) -> Tensor:
    """`value` with its dimensions in another order in memory."""
    if order is None:
        return value
    back = [order.index(dim) for dim in range(len(order))]
    return value.permute(tuple(order)).contiguous().permute(back)
