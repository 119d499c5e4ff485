"""A matrix product with what follows it, tile by tile, on the card's matrix units.

before: for i, j:  acc sum= a[i, k] * b[k, j];  y[i, j] = gelu(acc + bias[j])
after:  each program takes a tile of i and j; along k it multiplies tiles of a and b, and what it
        has then of acc goes through the rest before it is stored

Programs that run at the same time take tiles below each other, some rows of them: these read the
same parts of b, which stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stator.codegen.triton.emitter import Dim, Emitter
from stator.codegen.triton.shape import Shape, is_wide
from stator.core.dtypes import DType
from stator.loops.index import Axis, Index
from stator.loops.ir import Accumulate, Apply, Combine, Kernel, Load
from stator.loops.prims import Prim

HALVES: Final = frozenset({DType.F16, DType.BF16})
BELOW: Final = 8  # tiles below each other that run together
# Rows and columns of a tile, elements along the sum at a time, warps, stages.
TILES: Final = (
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (256, 128, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 128, 64, 4, 4),
    (128, 128, 32, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
)


@dataclass(frozen=True, slots=True)
class Product:
    """The parts of a kernel that is one."""

    total: Accumulate
    left: Load
    right: Load
    rows: Axis
    columns: Axis
    along: Axis

    def steps(self, load: Load) -> dict[Axis, int]:
        """How far apart neighbours of an operand lie, along each axis."""
        found = {axis: load.index.factor_of(axis) for axis in (self.rows, self.columns, self.along)}
        return {axis: step.constant or 0 for axis, step in found.items() if step is not None}


def product_of(kernel: Kernel) -> Product | None:
    """The parts of a product of two half-precision matrices of known sizes; None if it is none."""
    if len(kernel.outer) != 2 or not kernel.stages or len(kernel.stages[0].body) != 1:
        return None
    first, *rest = kernel.stages
    (total,) = first.body
    if len(first.inner) != 1 or any(stage.inner for stage in rest) or first.in_order:
        return None
    (rows, columns), (along,) = kernel.outer, first.inner
    if any(axis.size.constant is None for axis in (rows, columns, along)):
        return None
    if not isinstance(total, Accumulate) or total.combine is not Combine.SUM:
        return None
    match total.value:
        case Apply(prim=Prim.MUL, args=(Load() as one, Load() as other)):
            pairs = ((one, other), (other, one))
            made = (Product(total, a, b, rows, columns, along) for a, b in pairs)
            return next((product for product in made if _is_matrices(product)), None)
    return None


def _is_matrices(product: Product) -> bool:
    """Whether each operand is half precision, and lies by its own two axes alone."""
    if {product.left.buffer.dtype, product.right.buffer.dtype} not in [{dtype} for dtype in HALVES]:
        return False
    for load, axis in ((product.left, product.rows), (product.right, product.columns)):
        steps = product.steps(load)
        lies_at = Index.of(0)
        for own in (axis, product.along):
            lies_at = lies_at + Index.of(own) * steps.get(own, 0)
        if load.index is not lies_at:
            return False
    return True


def product_shapes(kernel: Kernel) -> tuple[Shape, ...]:
    """Shapes to measure a product in."""
    found = product_of(kernel)
    assert found is not None, "it was looked at"
    rows, columns = (axis.size.constant or 0 for axis in (found.rows, found.columns))
    made = [Shape("product", n, k, w, stages=s, height=m) for m, n, k, w, s in TILES]
    return tuple(s for s in made if s.height < 2 * rows and s.outer < 2 * columns) or (made[-1],)


def product_lines(kernel: Kernel, shape: Shape) -> Emitter:
    """Everything before what follows the product; the accumulator holds its tile."""
    product = product_of(kernel)
    assert product is not None, "it was looked at"
    halves = {b.dtype for b in (*kernel.read, *kernel.written) if b.dtype.is_float} <= HALVES
    tile = (("y", product.rows, shape.height), ("x", product.columns, shape.outer))
    e = Emitter(kernel, tuple(Dim(n, str(b), None) for n, _, b in tile), is_coarse=halves)
    _choose_tile(e, product, shape)
    dims = []
    for name, axis, block in tile:
        at = "[:, None]" if name == "y" else "[None, :]"
        e.line(f"{name}_ = {name}_tile * {block} + tl.arange(0, {block}){at}")
        mask = None if _fits(axis, block) else e.let(f"{name}_ < {axis.size.constant}", "m")
        dims.append(Dim(name, str(block), mask))
        e.enter(axis, f"{name}_", name)
    e.dims = tuple(dims)
    _multiply(e, product, shape)
    e.accumulated(product.total.name, "total_")
    return e


def _choose_tile(e: Emitter, product: Product, shape: Shape) -> None:
    across = _blocks(product.columns, shape.outer)
    down = _blocks(product.rows, shape.height)
    program = "tl.program_id(0)"
    e.line(f"number_ = {program}{'.to(tl.int64)' if is_wide(e.kernel) else ''}")
    e.line(f"first_ = number_ // {BELOW * across} * {BELOW}")
    e.line(f"below_ = tl.minimum({down} - first_, {BELOW})")
    e.line(f"number_ = number_ % {BELOW * across}")
    e.line("y_tile = first_ + number_ % below_")
    e.line("x_tile = number_ // below_")


def _multiply(e: Emitter, product: Product, shape: Shape) -> None:
    """The loop along the sum.  Addresses move on: the compiler sees that they lie in a line."""
    length, block = product.along.size.constant or 0, shape.inner
    y, x = e.dims
    operands = (
        ("left", product.left, product.rows, y, "[None, :]"),
        ("right", product.right, product.columns, x, "[:, None]"),
    )
    e.line(f"k_ = tl.arange(0, {block})")
    moves, loads = [], []
    for name, load, axis, dim, at in operands:
        steps = product.steps(load)
        own, along = steps.get(axis, 0), steps.get(product.along, 0)
        e.line(f"{name}_at = {load.buffer.name} + ({dim.name}_ * {own} + k_{at} * {along})")
        masks = [f"(k_{at} < {length} - r_)"] if length % block else []
        masks += [dim.mask] if dim.mask else []
        given = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        loads.append(f"{name}_ = tl.load({name}_at{given})")
        moves.append(f"{name}_at += {block * along}")
    e.line(f"total_ = tl.full([{y.block}, {x.block}], 0.0, tl.float32)")
    with e.inside(f"for r_ in range(0, {length}, {block}):"):
        for line in (*loads, "total_ = dotted(left_, right_, total_)", *moves):
            e.line(line)


def _blocks(axis: Axis, block: int) -> int:
    return -(-(axis.size.constant or 0) // block)


def _fits(axis: Axis, block: int) -> bool:
    return (axis.size.constant or 0) % block == 0
