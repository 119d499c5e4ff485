"""Patterns of users': what one function traces to, replaced with what another does.

    from stator import patterns

    fused = patterns.PatternPass("fuse_rms_norm")
    patterns.register_replacement(search, replace, example_inputs, patterns.fwd_only, fused)
    stator.passes.register("joint", fused)

Names and arguments are those of PyTorch's matcher.  Every match is proven on what it found, that
of a stored pattern too (graph/replace.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from stator.aot.trace import trace
from stator.errors import CompileError
from stator.graph.edit import drop_unread
from stator.graph.match import (
    MULTIPLE,
    Arg,
    CallFunction,
    CallFunctionVarArgs,
    CallMethod,
    CallModule,
    ExclusiveKeywordArg,
    Ignored,
    KeywordArg,
    ListOf,
    Match,
    MultiOutputPattern,
    Pattern,
    RepeatedExpr,
)
from stator.graph.order import stable_topological_sort
from stator.graph.pattern_text import pattern_text, read_pattern
from stator.graph.replace import Check, PatternPass, Replacement, Sides, TraceFn
from stator.graph.rules import Rewrite, Rule, apply_rules, rule
from stator.torch_api import FakeTensor, FakeTensorMode, ShapeEnv, make_fx, pytree

__all__ = [
    "MULTIPLE",
    "Arg",
    "CallFunction",
    "CallFunctionVarArgs",
    "CallMethod",
    "CallModule",
    "ExclusiveKeywordArg",
    "Ignored",
    "KeywordArg",
    "ListOf",
    "Match",
    "MultiOutputPattern",
    "Pattern",
    "PatternPass",
    "RepeatedExpr",
    "Rewrite",
    "Rule",
    "apply_rules",
    "forward_mode",
    "fwd_only",
    "gen_register_replacement",
    "joint_fwd_bwd",
    "register_graph_pattern",
    "register_replacement",
    "rule",
    "stable_topological_sort",
]


def fwd_only(function: Callable[..., Any], args: Sequence[Any]) -> fx.GraphModule:
    """What the compiler traces `function` to, without gradients."""
    with torch.no_grad():
        return _traced(function, [_without_grad(value) for value in args])


def joint_fwd_bwd(function: Callable[..., Any], args: Sequence[Any]) -> fx.GraphModule:
    """What the compiler traces `function` to with its backward: further inputs are tangents."""
    with torch.enable_grad():
        return _traced(function, args)


def forward_mode(function: Callable[..., Any], args: Sequence[Any]) -> fx.GraphModule:
    """`function` and its derivative along tangents, which are the second half of the inputs."""

    def dual(*values: Any) -> Any:
        half = len(values) // 2
        return torch.func.jvp(function, values[:half], values[half:])

    fakes, mode = _faked(args)
    tensors = [_without_grad(value) for value in fakes]
    with mode, torch.no_grad():
        module = make_fx(dual)(*tensors, *(torch.empty_like(value) for value in tensors))
    drop_unread(module.graph)
    return module


def _without_grad(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _faked(args: Sequence[Any]) -> tuple[list[Any], FakeTensorMode]:
    known = [value.fake_mode for value in args if isinstance(value, FakeTensor)]
    mode = known[0] if known else FakeTensorMode(shape_env=ShapeEnv())
    return [
        mode.from_tensor(value, static_shapes=True) if _is_real(value) else value for value in args
    ], mode


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def _traced(function: Callable[..., Any], args: Sequence[Any]) -> fx.GraphModule:
    fakes, mode = _faked(args)

    def flat(*values: Any) -> list[Any]:
        return pytree.tree_leaves(function(*values))  # type: ignore[no-any-return]  # untyped

    traced = trace(flat, fakes, mode)
    graph = traced.module.graph
    results = [*traced.values, *traced.grads]
    (output,) = graph.find_nodes(op="output")
    graph.erase_node(output)
    graph.output(results)
    drop_unread(graph)
    return traced.module


def register_replacement(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Sequence[Any],
    trace_fn: TraceFn,
    pass_dicts: PatternPass | Sequence[PatternPass],
    extra_check: Check | None = None,
    scalar_workaround: Mapping[str, float | int] | None = None,
    exclusive_arg_names: Iterable[str] = (),
    search_fn_pattern: Pattern | None = None,
    skip_duplicates: bool = False,
) -> bool:
    """Replace what `search_fn` traces to with what `replace_fn` does, wherever it is proven.

    `scalar_workaround` names arguments that are numbers, with a value for each that stands for it
    in the trace: they have to differ.  Returns False for a duplicate that was skipped.
    """
    scalars = dict(scalar_workaround or {})
    if len({(type(value), value) for value in scalars.values()}) != len(scalars):
        raise CompileError("patterns", "two numbers of scalar_workaround are the same")
    names = list(inspect.signature(search_fn).parameters)
    entry = Replacement(
        Sides(search_fn, replace_fn, names, scalars),
        list(example_inputs),
        trace_fn,
        extra_check,
        frozenset(exclusive_arg_names),
    )
    pattern = search_fn_pattern or entry.loose()
    text = f"{pattern_text(pattern)}{replace_fn.__module__}.{replace_fn.__qualname__}"
    passes = [pass_dicts] if isinstance(pass_dicts, PatternPass) else list(pass_dicts)
    for one in passes:
        if text in one.known:
            if skip_duplicates:
                return False
            raise CompileError(
                "patterns", f"{search_fn.__name__} is registered already", hint="skip_duplicates"
            )
        one.known[text] = entry
        one.functions += [search_fn, replace_fn, *([extra_check] if extra_check else [])]
        one.register(pattern, entry)
    return True


def gen_register_replacement(
    unique_name: str,
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Sequence[Any],
    trace_fn: TraceFn,
    pass_dicts: PatternPass | Sequence[PatternPass],
    extra_check: Check | None = None,
    scalar_workaround: Mapping[str, float | int] | None = None,
    exclusive_arg_names: Iterable[str] = (),
    skip_duplicates: bool = False,
) -> bool:
    """As `register_replacement`, with the pattern that `stator patterns build` stored, if any.

    It lies in `stored_patterns`, beside the file of the search function.
    """
    file = Path(inspect.getfile(search_fn)).parent / "stored_patterns" / f"{unique_name}.py"

    def registered(pattern: Pattern | None, passes: Sequence[PatternPass]) -> bool:
        return register_replacement(
            search_fn,
            replace_fn,
            example_inputs,
            trace_fn,
            passes,
            extra_check,
            scalar_workaround,
            exclusive_arg_names,
            pattern,
            skip_duplicates,
        )

    def fresh_text() -> str:
        alone = PatternPass()
        registered(None, [alone])
        ((pattern, _),) = alone.all_entries()
        return pattern_text(pattern)

    _stored[file] = fresh_text
    passes = [pass_dicts] if isinstance(pass_dicts, PatternPass) else list(pass_dicts)
    return registered(read_pattern(file) if file.exists() else None, passes)


_stored: dict[Path, Callable[[], str]] = {}  # what each file should say, traced when asked


def stale_patterns() -> dict[Path, str]:
    """Files of stored patterns that say something else than a trace does now, or are missing."""
    now = {file: text() for file, text in _stored.items()}
    return {
        file: text
        for file, text in now.items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    }


def register_graph_pattern(
    pattern: Pattern, *, pass_dict: PatternPass, extra_check: Check | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: call the function with a match and what it bound, for it to edit the graph."""

    def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
        def apply(found: Match, graph: fx.Graph) -> bool:
            if extra_check is not None and not extra_check(found):
                return False
            handler(found, *found.args, **found.kwargs)
            return True

        pass_dict.functions += [handler, *([extra_check] if extra_check else [])]
        pass_dict.register(pattern, apply)
        return handler

    return decorate
