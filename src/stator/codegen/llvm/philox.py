"""Philox in LLVM: straight-line code, whose products of 64 bits are a vector's as well."""

from __future__ import annotations

from stator.codegen.llvm.writer import Writer
from stator.loops.philox import FACTORS, ROUNDS, STEPS

_WORD = 0xFFFFFFFF


def emit_philox_one(w: Writer, args: list[str]) -> str:
    """One random word of a key, a stream and a number: its last bits say which of four."""
    key_0, key_1, stream, low, high = args
    shifted = _both(w, "lshr", low, "2"), _both(w, "shl", high, "30")
    counter = _both(w, "or", *shifted), _both(w, "lshr", high, "2"), stream, "0"
    a, b, c, d = _words(w, (key_0, key_1), counter)
    is_odd = w.let(f"trunc i32 {low} to i1")
    half = _both(w, "lshr", low, "1")
    is_upper = w.let(f"trunc i32 {half} to i1")
    lower = w.let(f"select i1 {is_odd}, i32 {b}, i32 {a}")
    upper = w.let(f"select i1 {is_odd}, i32 {d}, i32 {c}")
    return w.let(f"select i1 {is_upper}, i32 {upper}, i32 {lower}")


def _words(
    w: Writer, key: tuple[str, str], counter: tuple[str, str, str, str]
) -> tuple[str, str, str, str]:
    a, b, c, d = counter
    for number in range(ROUNDS):
        first, second = (
            _both(w, "add", word, str(number * step & _WORD))
            for word, step in zip(key, STEPS, strict=True)
        )
        (high, low), (other_high, other_low) = (
            _product(w, a, FACTORS[0]),
            _product(w, c, FACTORS[1]),
        )
        a = _both(w, "xor", _both(w, "xor", other_high, b), first)
        c = _both(w, "xor", _both(w, "xor", high, d), second)
        b, d = other_low, low
    return a, b, c, d


def _product(w: Writer, word: str, factor: int) -> tuple[str, str]:
    """The upper and the lower word."""
    wide = w.let(f"zext i32 {word} to i64")
    product = w.let(f"mul i64 {wide}, {factor}")
    above = w.let(f"lshr i64 {product}, 32")
    return w.let(f"trunc i64 {above} to i32"), w.let(f"trunc i64 {product} to i32")


def _both(w: Writer, operation: str, x: str, y: str) -> str:
    return w.let(f"{operation} i32 {x}, {y}")
