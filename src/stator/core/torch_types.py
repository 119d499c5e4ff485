"""Names for the kinds of functions that travel between the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

# A program: flat arguments (tensors and numbers) to flat results.
Flat: TypeAlias = Callable[..., Sequence[Any]]
# A compiled graph: takes its arguments in a list and empties it, so that they can die inside.
Boxed: TypeAlias = Callable[[list[Any]], Sequence[Any]]
