"""Reports for tests: read back, and made up at any size."""

from __future__ import annotations

from typing import Any


def text_after(history: dict[str, Any], passes: int) -> list[str]:
    """The lines of a graph after so many of its passes, by their edits."""
    text = list(history["text"])
    for one in history["passes"][:passes]:
        for at, removed, added in reversed(one["edits"]):
            text[at : at + removed] = added
    return text


def made_up(nodes: int, kernels: int) -> dict[str, Any]:
    """A report of one large graph, whose pass changed every tenth node."""
    lines = {f"add_{n}": f"model/file_{n % 7}.py:{n % 997 + 1}" for n in range(nodes)}
    text = [f"add_{n}: f32[64, 64] = aten.add.Tensor(add_{n - 1}, x)" for n in range(nodes)]
    edits = [[n, 1, [text[n].replace("add.Tensor", "mul.Tensor")]] for n in range(0, nodes, 10)]
    done = {"name": "a_pass", "seconds": 0.01, "rewrites": ["one"] * len(edits), "edits": edits}
    none = {"name": "idle_pass", "seconds": 0.001, "rewrites": [], "edits": []}
    history = {"name": "forward", "graph": "forward", "text": text, "lines": lines}
    made = [_kernel(n, nodes // kernels, lines) for n in range(kernels)]
    buffers = [
        {"name": f"add_{n}", "bytes": 4096, "first": n, "last": n + 5, "torch": False}
        | {"offset": 4096 * (n % 6) if n % 2 else None}
        for n in range(kernels)
    ]
    half = {
        "name": "forward",
        "steps": [f"add_{n} = kernel_{n}(…)" for n in range(kernels)],
        "kernels": made,
        "code": ["define void @code_0() {}"],
        "calls": [],
        "unfused": [
            {"kernels": [f"kernel_{n}", f"kernel_{n + 1}"], "nodes": [f"add_{n}", f"add_{n + 1}"]}
            | {"reason": "they are made up"}
            for n in range(kernels - 1)
        ],
        "memory": {"arena": 6 * 4096, "peak": 10 * 4096, "buffers": buffers},
    }
    graph = {
        **{"number": 1, "seconds": 1.5, "cache": "hit", "fallback": None, "notes": []},
        **{"generated": nodes, "called": 0, "inputs": 0, "outputs": 0, "step_peak": None},
        "stages": [
            {"name": name, "seconds": 0.5, "nodes_before": 0, "nodes_after": 0, "changed": 0}
            for name in ("trace", "forward/a_pass", "forward/plan")
        ],
        "graphs": [{**history, "passes": [done, none]}],
        "saved": [],
        "halves": [half],
    }
    sources = dict.fromkeys(lines.values(), "y = x + 1  # <b>not bold</b>")
    return {
        **{"stator": "0", "torch": "0", "graphs": [graph]},
        **{"recompilations": [], "uncaptured": []},
        "sources": sources,
    }


def _kernel(number: int, each: int, lines: dict[str, str]) -> dict[str, Any]:
    nodes = [f"add_{n}" for n in range(number * each, (number + 1) * each)]
    return {
        **{"name": f"kernel_{number}", "step": number, "shared": 1, "code": 0},
        "lines": [lines[nodes[0]]],
        "operators": [[node, "aten.add.Tensor"] for node in nodes],
        **{"title": "add", "makes": nodes[-1:]},
        **{"read": 16384, "written": 16384, "loops": f"kernel kernel_{number}\n  stage"},
        **{"runs": 3, "seconds": 3e-5, "least": 1e-5 + number * 1e-8},
    }
