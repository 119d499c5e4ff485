"""Convolutions of dequantised images are convolutions of integers, by oneDNN."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import fx

from stator.graph.build import Builder
from stator.graph.edit import drop_unread
from stator.graph.run import Ctx
from stator.ops.libraries import int8_convolution as onednn_convolution
from stator.ops.libraries import int8_convolution_of_tensors
from stator.ops.packs import int8_convolution_weight, int8_linear_weight
from stator.ops.quantize import quantized
from stator.ops.writes import ADDED, int8_convolution_plus, int8_linear_plus
from stator.passes.freezing.quantized import (
    BOUNDED,
    DEQUANTIZE,
    FLOATS,
    Integers,
    IntegerWeight,
    Tail,
    moved,
    readers,
)
from stator.passes.freezing.take_constants import constant_nodes

aten = torch.ops.aten

INSIDE: Final = frozenset({"relu", "hardtanh", "hardswish", "swish"})
CHOOSERS: Final = (quantized.choose_qparams.tensor, quantized.choose_qparams_symmetric.tensor)
LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
TO_ROWS: Final = [0, 2, 3, 1]  # an image, pixel by pixel
FROM_ROWS: Final = [0, 3, 1, 2]


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution, its image and weight being dequantised."""

    node: fx.Node
    image: Integers
    weight: IntegerWeight


def int8_convolution(graph: fx.Graph, ctx: Ctx) -> int:
    """Let convolutions compute with the integers that their operands were; return how many do.

    before: y = convolution(dequantize(x, 0.1, 3, …), dequantize_per_channel(w, s, …), b, …)
            z = quantize(relu(y), 0.2, 5, …)
    after:  z = qconv_pointwise(x, 0.1, 3, int8_convolution_weight(w, …), s, …, 0.2, 5, u8, "relu")

    A sum with other integers that nobody reads later is inside as well: the library adds to them
    where they lie.  Its result lies channels last; where it lay otherwise, a clone puts it back.
    A convolution of single pixels with a sum is a product of their channels: a convolution returns
    a copy of what it added to, a product does not.
    """
    if onednn_convolution() is None:
        return 0
    settled = constant_nodes(graph)
    changed = 0
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        found = _convolution(node, settled)
        if found is None:
            continue
        if isinstance(found, str):
            ctx.record.notes.append(f"{node.name} is not int8: {found}")
            continue
        if ctx.fuel.spend(f"int8_convolution: {node.name}"):
            plain = found.image.is_dynamic or node.meta["val"].dim() != 4
            makers = None if ctx.has_python else (onednn_convolution(), int8_convolution_plus)
            may_add = partial(_may_add, _unlaid(found.image.source), makers)
            inside = INSIDE if ctx.has_python else INSIDE - BOUNDED
            tail = Tail.of([node], frozenset()) if plain else Tail.of([node], inside, may_add)
            ctx.record.notes.append(f"{node.name} {tail.told()}")
            if ctx.has_python and _is_product(found, tail):
                _rewrite_as_product(found, tail)
            else:
                _rewrite(found, tail)
            changed += 1
    drop_unread(graph)
    return changed


def _convolution(node: fx.Node, settled: dict[fx.Node, None]) -> Convolution | str | None:
    """The convolution that a node is; the reason, if it was to be expected; otherwise None."""
    image = Integers.behind(node.args[0])
    weight = IntegerWeight.behind(node.args[1], settled, turned=False)
    if isinstance(weight, str):
        return weight if image is not None else None
    if image is None:
        return "its image is not dequantised per tensor"
    return _why_not(node, image) or Convolution(node, image, weight)


def _why_not(node: fx.Node, image: Integers) -> str | None:
    value = node.meta["val"]
    if value.device.type != "cpu" or value.dtype not in FLOATS:
        return "it is not of float32 or bfloat16 on the CPU"
    if node.args[6]:
        return "it is a transposed one"
    if image.dtype is not torch.uint8:
        return "its image is not of uint8"
    if node.args[0].meta["val"].dim() != node.args[1].meta["val"].dim() or value.dim() > 5:
        return "it is not one of a batch of images"
    if any(
        isinstance(n, int) and n == 0 for n in (*value.size(), *node.args[0].meta["val"].size())
    ):
        return "it is empty"
    return None


def _rewrite(found: Convolution, tail: Tail) -> None:
    node, graph, weight = found.node, found.node.graph, found.weight
    _, _, bias, stride, padding, dilation, _, _, groups = node.args
    builder = Builder(graph, tail.last)
    if found.image.is_dynamic:
        _read_in_order(found.image.scale)
    image = _laid(found.image, builder)
    size = list(image.meta["val"].size())
    shape = size if all(isinstance(n, int) for n in size) else None
    scale, zero_point, dtype = tail.output
    called = int8_convolution_of_tensors() if found.image.is_dynamic else onednn_convolution()
    after, numbers = tail.activation, (found.image.scale, found.image.zero_point)
    with graph.inserting_before(tail.last):
        scales, points = weight.prepared(graph)
        packed = graph.call_function(
            int8_convolution_weight,
            (
                *(weight.node, scales, weight.zero_points),
                # Packed for some zero point, if it is known at run time alone.
                (1.0, 1) if found.image.is_dynamic else numbers,
                *(stride, padding, dilation, groups, shape),
            ),
        )
        packed.meta = {"val": weight.node.meta["val"]}
        arguments: tuple[Any, ...] = (image, *numbers, packed, scales, points, bias)
        arguments += (stride, padding, dilation, groups, scale, zero_point, dtype)
        activation = (after.name, list(after.numbers), after.algorithm)
        if tail.plus is not None:
            old = tail.plus
            arguments = (*arguments[:ADDED], _unlaid(old.source), *arguments[ADDED:])
            arguments += (old.scale, old.zero_point, "sum", None, *activation)
            made = graph.call_function(int8_convolution_plus, arguments)
        else:
            made = graph.call_function(called, (*arguments, *activation))
    made.meta = {**node.meta, "val": _channels_last(node.meta["val"], dtype)}
    tail.take_place(moved(_put_back(made, node.meta["val"], builder), tail.moves, builder))


def _is_product(found: Convolution, tail: Tail) -> bool:
    """Whether a convolution with a sum is a product of the channels of each pixel."""
    _, _, _, stride, padding, dilation, _, _, groups = found.node.args
    numbers = (*stride, *padding, *dilation, groups, *found.weight.node.meta["val"].size()[2:])
    return (
        tail.plus is not None and not found.image.moves and numbers == (1, 1, 0, 0, 1, 1, 1, 1, 1)
    )


def _rewrite_as_product(found: Convolution, tail: Tail) -> None:
    node, graph, weight, old = found.node, found.node.graph, found.weight, tail.plus
    assert old is not None, "one with a sum"
    builder = Builder(graph, tail.last)
    image, added = (_rows(n, builder) for n in (_laid(found.image, builder), _unlaid(old.source)))
    size = list(image.meta["val"].size())
    shape = size if all(isinstance(n, int) for n in size) else None
    matrix = builder.call(aten.squeeze.dims, weight.node, [2, 3])
    scale, zero_point, dtype = tail.output
    with graph.inserting_before(tail.last):
        packed = graph.call_function(int8_linear_weight, (matrix, weight.zero_points, shape))
        packed.meta = {"val": matrix.meta["val"].t()}
        scales, points = weight.prepared(graph)
        arguments: tuple[Any, ...] = (image, found.image.scale, found.image.zero_point, packed)
        arguments += (scales, points, added, node.args[2], scale, zero_point, dtype)
        arguments += (old.scale, old.zero_point, "sum", 1.0, tail.activation.name, [], "")
        made = graph.call_function(int8_linear_plus, arguments)
    value = node.meta["val"]
    made.meta = {**node.meta, "val": value.new_empty(added.meta["val"].size(), dtype=dtype)}
    laid = builder.call(aten.permute.default, made, FROM_ROWS)
    tail.take_place(moved(_put_back(laid, value, builder), tail.moves, builder))


def _rows(image: fx.Node, builder: Builder) -> fx.Node:
    """An image that lies channels last, pixel by pixel; what was such before, as it was."""
    if image.target is aten.permute.default and image.args[1] == FROM_ROWS:
        source = image.args[0]
        assert isinstance(source, fx.Node), "a permutation is one of a tensor"
        return source
    return builder.call(aten.permute.default, image, TO_ROWS)


def _may_add(image: fx.Node, makers: tuple[Any, ...] | None, old: Integers, add: fx.Node) -> bool:
    """Whether the library, which reads `image`, may add to the integers where they lie.

    As its own result would lie, and as nobody reads them any more.  Without Python there is nobody
    to copy them should a plan need it: then they are to be new tensors, of one of the `makers`.
    """
    node = _unlaid(old.source)
    last = LAST[4]
    if node is image or node.op == "placeholder":
        return False
    if makers is not None and node.target not in makers:
        return False
    if not node.meta["val"].is_contiguous(memory_format=last):
        return False
    # Other readers of the pixels that an image is made of read its memory, too.
    pixels = [node.args[0]] if node.target is aten.permute.default else []
    found = (user for reader in (node, old.source, *pixels) for user in _reads(reader))
    return all(user is add or user < add for user in found)


def _reads(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads integers, dequantised or not."""
    for reader in readers(node):
        yield from readers(reader) if reader.target in DEQUANTIZE else (reader,)


def _unlaid(node: fx.Node) -> fx.Node:
    """What was laid otherwise for others."""
    while node.target is aten.clone.default:
        source = node.args[0]
        assert isinstance(source, fx.Node), "a copy is one of a tensor"
        node = source
    return node


def _laid(image: Integers, builder: Builder) -> fx.Node:
    """The integers channels last, as the library would lay them itself: a kernel does it."""
    source = image.source if image.moves else _unlaid(image.source)
    node = moved(source, image.moves, builder)
    last = LAST.get(node.meta["val"].dim())
    if last is None or node.meta["val"].is_contiguous(memory_format=last):
        return node
    return builder.call(aten.clone.default, node, memory_format=last)


def _read_in_order(scale: fx.Node) -> None:
    """Let the extremes of an image, whose order does not matter, be found as it lies."""
    chosen = scale.args[0] if scale.target is operator.getitem else None
    if not isinstance(chosen, fx.Node) or chosen.target not in CHOOSERS:
        return
    image = chosen.args[0]
    assert isinstance(image, fx.Node), "parameters are chosen for a tensor"
    value = image.meta["val"]
    order = sorted(range(value.dim()), key=lambda d: -value.stride(d))
    if not value.is_contiguous() and value.permute(order).is_contiguous():
        turned = Builder(chosen.graph, chosen).call(aten.permute.default, image, order)
        chosen.replace_input_with(image, turned)


def _channels_last(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the size, as oneDNN lays it."""
    batch, channels, *rest = value.size()
    laid = value.new_empty((batch, *rest, channels), dtype=dtype)
    return laid.permute(0, -1, *range(1, laid.dim() - 1))


def _put_back(made: fx.Node, value: torch.Tensor, builder: Builder) -> fx.Node:
    """The result in the order that readers expect."""
    if made.meta["val"].stride() == value.stride():
        return made
    if value.is_contiguous():
        return builder.call(aten.clone.default, made, memory_format=torch.contiguous_format)
    order = sorted(range(value.dim()), key=lambda d: -value.stride(d))
    back = [order.index(d) for d in range(value.dim())]
    turned = builder.call(aten.permute.default, made, order)
    laid = builder.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    return builder.call(aten.permute.default, laid, back)
