"""Threefry in LLVM: straight-line code on 32-bit words, so that a loop over elements is a vector's.

Both words come from the same rounds: where a kernel takes both, LLVM computes them once.  Rounds
on a key that is the same for all elements leave the loop.
"""

from __future__ import annotations

from stator.codegen.llvm.writer import Writer
from stator.loops.threefry import PARITY, ROTATIONS, ROUNDS


def emit_threefry(w: Writer, args: list[str]) -> tuple[str, str]:
    """Two random words of the key (the first two arguments) and the counter (the last two)."""
    keys = [*args[:2], _both(w, "xor", _both(w, "xor", args[0], args[1]), str(PARITY))]
    x, y = _both(w, "add", args[2], keys[0]), _both(w, "add", args[3], keys[1])
    for number in range(ROUNDS):
        x = _both(w, "add", x, y)
        y = _both(w, "xor", _rotated(w, y, ROTATIONS[number % len(ROTATIONS)]), x)
        if number % 4 == 3:
            turn = number // 4 + 1
            x = _both(w, "add", x, keys[turn % 3])
            y = _both(w, "add", _both(w, "add", y, keys[(turn + 1) % 3]), str(turn))
    return x, y


def emit_one(w: Writer, args: list[str]) -> str:
    """One random word of the key and a number: the number's last bit says which of two."""
    key_0, key_1, low, high = args
    shifted = _both(w, "lshr", low, "1"), _both(w, "shl", high, "31")
    counter = _both(w, "or", *shifted), _both(w, "lshr", high, "1")
    first, second = emit_threefry(w, [key_0, key_1, *counter])
    is_odd = w.let(f"trunc i32 {low} to i1")
    return w.let(f"select i1 {is_odd}, i32 {second}, i32 {first}")


def _rotated(w: Writer, word: str, count: int) -> str:
    """Two shifts: LLVM makes the machine's rotation of them."""
    left, right = _both(w, "shl", word, str(count)), _both(w, "lshr", word, str(32 - count))
    return _both(w, "or", left, right)


def _both(w: Writer, operation: str, x: str, y: str) -> str:
    return w.let(f"{operation} i32 {x}, {y}")
