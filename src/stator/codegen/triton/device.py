"""Functions that kernels call on the GPU, besides Triton's own and libdevice's.

They are written in Triton's language and use its core alone, so that its interpreter runs them as
well: compile.py and interpreted.py each make of them what they need.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
# ruff: noqa: ANN001, ANN201
import triton.language as tl

# --- how an accumulator takes a value in ---


def add(x, y):
    """SUM."""
    return x + y


def multiply(x, y):
    """PROD."""
    return x * y


def larger(x, y):
    """MAX of integers, ANY."""
    return tl.maximum(x, y)


def smaller(x, y):
    """MIN of integers, ALL."""
    return tl.minimum(x, y)


def larger_or_nan(x, y):
    """MAX of floats: NaN wins."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


def smaller_or_nan(x, y):
    """MIN of floats: NaN wins."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


# --- integers ---


def divided(x, y):
    """Toward zero; by zero gives 0."""
    return tl.where(y == 0, 0, x // tl.where(y == 0, 1, y)).to(x.dtype)


def remainder(x, y):
    """With the sign of the dividend; by zero gives 0."""
    return tl.where(y == 0, 0, x % tl.where(y == 0, 1, y)).to(x.dtype)


def floor_divided(x, y):
    """Toward minus infinity, by a positive number."""
    return (x - floor_remainder(x, y)) // y


def floor_remainder(x, y):
    """What is left of it: not negative."""
    rest = x % y
    return tl.where(rest < 0, rest + y, rest)


def shifted_left(x, count, width: tl.constexpr):
    """A count that is negative or reaches the width moves everything out."""
    fits = (count >= 0) & (count < width)
    return tl.where(fits, x << tl.where(fits, count, 0), 0).to(x.dtype)


def shifted_right(x, count, width: tl.constexpr):
    """The same; what comes in is the sign."""
    fits = (count >= 0) & (count < width)
    return (x >> tl.where(fits, count, width - 1)).to(x.dtype)


def shifted_right_unsigned(x, count, width: tl.constexpr):
    """The same; what comes in is 0."""
    fits = (count >= 0) & (count < width)
    return tl.where(fits, x >> tl.where(fits, count, 0), 0).to(x.dtype)


# --- mathematics ---


def power_of_two(x):
    """2 to that power, to some ulp of f32; what is less than 1e-38 is 0: one of hardware.py's."""
    return tl.exp2(x)


def reciprocal(x):
    """1 over it, to an ulp of f32; 0 where it is beyond 8e37: one of hardware.py's."""
    return 1.0 / x


def normal_cdf(x):
    """The normal distribution, within 1e-7 of 1: a polynomial in 1 / (1 + p |x|) times exp(-x²/2).

    Formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions.
    """
    t = reciprocal(1.0 + 0.23164189 * tl.abs(x))  # 0.3275911 / sqrt(2)
    sum_ = 0.5307027145 * t - 0.7265760135  # its numbers, halved
    sum_ = sum_ * t + 0.7107068705
    sum_ = sum_ * t - 0.142248368
    sum_ = sum_ * t + 0.127414796
    tail = sum_ * t * power_of_two(-0.72134752 * x * x)  # log2(e) / 2
    return tl.where(x < 0, tail, 1.0 - tail)


def coarse_tanh(x):
    """To some ulp of f32, of the hardware's exponential; near 0, where 1 would cancel, a series."""
    near = x * (1.0 - x * x * 0.3333333333333333)
    grown = power_of_two(x * 2.885390081777927)  # 2 / log(2); what it makes 0 of, 1 hides
    return tl.where(tl.abs(x) < 0.0625, near, 1.0 - 2.0 * reciprocal(grown + 1.0))


# --- random bits: loops/threefry.py ---


def rotated(word, count: tl.constexpr):
    """The bits of a word, turned to the left."""
    return (word << count) | (word >> (32 - count))


def four_rounds(x, y, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr):
    """Rounds between two uses of the key."""
    x = x + y
    y = rotated(y, a) ^ x
    x = x + y
    y = rotated(y, b) ^ x
    x = x + y
    y = rotated(y, c) ^ x
    x = x + y
    y = rotated(y, d) ^ x
    return x, y


def threefry_words(key_0, key_1, counter_0, counter_1):
    """Two words at random."""
    k0 = key_0.to(tl.uint32, bitcast=True)
    k1 = key_1.to(tl.uint32, bitcast=True)
    k2 = k0 ^ k1 ^ tl.full(k0.shape, 0x1BD11BDA, tl.uint32)
    x = counter_0.to(tl.uint32, bitcast=True) + k0
    y = counter_1.to(tl.uint32, bitcast=True) + k1
    x, y = four_rounds(x, y, 13, 15, 26, 6)
    x, y = x + k1, y + k2 + tl.full(k0.shape, 1, tl.uint32)
    x, y = four_rounds(x, y, 17, 29, 16, 24)
    x, y = x + k2, y + k0 + tl.full(k0.shape, 2, tl.uint32)
    x, y = four_rounds(x, y, 13, 15, 26, 6)
    x, y = x + k0, y + k1 + tl.full(k0.shape, 3, tl.uint32)
    x, y = four_rounds(x, y, 17, 29, 16, 24)
    x, y = x + k1, y + k2 + tl.full(k0.shape, 4, tl.uint32)
    x, y = four_rounds(x, y, 13, 15, 26, 6)
    return x + k2, y + k0 + tl.full(k0.shape, 5, tl.uint32)


def threefry_0(key_0, key_1, counter_0, counter_1):
    """The first of the two."""
    x, _ = threefry_words(key_0, key_1, counter_0, counter_1)
    return x.to(tl.int32, bitcast=True)


def threefry_1(key_0, key_1, counter_0, counter_1):
    """The second of the two."""
    _, y = threefry_words(key_0, key_1, counter_0, counter_1)
    return y.to(tl.int32, bitcast=True)


def threefry_one(key_0, key_1, low, high):
    """One word for each number: its last bit says which of the two of its half."""
    low = low.to(tl.uint32, bitcast=True)
    high = high.to(tl.uint32, bitcast=True)
    half = (low >> 1) | (high << 31)
    x, y = threefry_words(key_0, key_1, half, high >> 1)
    return tl.where((low & 1) == 0, x, y).to(tl.int32, bitcast=True)


# --- loops/philox.py ---


def philox_round(a, b, c, d, key_0, key_1):
    """Products of 64 bits: for the upper and the lower word by themselves ptxas may take two."""
    p = a.to(tl.uint64) * tl.full(a.shape, 0xD2511F53, tl.uint64)
    q = c.to(tl.uint64) * tl.full(c.shape, 0xCD9E8D57, tl.uint64)
    first = (q >> 32).to(tl.uint32) ^ b ^ key_0
    third = (p >> 32).to(tl.uint32) ^ d ^ key_1
    return first, q.to(tl.uint32), third, p.to(tl.uint32)


def philox_words(key_0, key_1, a, b, stream):
    """Four words at random; the keys of the rounds are the same for a whole block."""
    k0 = key_0.to(tl.uint32, bitcast=True)
    k1 = key_1.to(tl.uint32, bitcast=True)
    c = stream.to(tl.uint32, bitcast=True)
    d = tl.full(c.shape, 0, tl.uint32)
    for number in tl.static_range(10):
        if number > 0:
            k0 += tl.full(k0.shape, 0x9E3779B9, tl.uint32)
            k1 += tl.full(k1.shape, 0xBB67AE85, tl.uint32)
        a, b, c, d = philox_round(a, b, c, d, k0, k1)
    return a, b, c, d


def philox_one(key_0, key_1, stream, low, high):
    """One word for each number: its last two bits say which of the four of its quarter."""
    low = low.to(tl.uint32, bitcast=True)
    high = high.to(tl.uint32, bitcast=True)
    quarter = (low >> 2) | (high << 30)
    a, b, c, d = philox_words(key_0, key_1, quarter, high >> 2, stream)
    is_even = (low & 1) == 0
    word = tl.where((low & 2) == 0, tl.where(is_even, a, b), tl.where(is_even, c, d))
    return word.to(tl.int32, bitcast=True)


def philox_quarter(key_0, key_1, stream, quarter):
    """Its four words; a quarter of 64 bits fills two words of the counter."""
    if quarter.dtype == tl.int64:
        above = (quarter >> 32).to(tl.uint32)
    else:
        above = tl.full(stream.shape, 0, tl.uint32)
    return philox_words(key_0, key_1, quarter.to(tl.uint32), above, stream)


def philox_fours(key_0, key_1, stream, quarter):
    """All words of each quarter, in two dimensions more: the rounds are done once."""
    a, b, c, d = philox_quarter(key_0, key_1, stream, quarter)
    return tl.join(tl.join(a, c), tl.join(b, d)).to(tl.int32, bitcast=True)


def philox_eights(key_0, key_1, stream, quarter):
    """All words of each quarter and the next, in three dimensions more."""
    a, b, c, d = philox_quarter(key_0, key_1, stream, quarter)
    e, f, g, h = philox_quarter(key_0, key_1, stream, quarter + 1)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd).to(tl.int32, bitcast=True)


FUNCTIONS = (
    *(add, multiply, larger, smaller, larger_or_nan, smaller_or_nan),
    *(divided, remainder, floor_divided, floor_remainder, shifted_left, shifted_right),
    *(
        shifted_right_unsigned,
        power_of_two,
        reciprocal,
        normal_cdf,
        coarse_tanh,
        rotated,
        four_rounds,
        threefry_words,
        threefry_0,
        threefry_1,
        threefry_one,
        philox_round,
        philox_words,
        philox_one,
        philox_quarter,
        philox_fours,
        philox_eights,
    ),
)
