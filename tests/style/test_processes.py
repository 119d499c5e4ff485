"""What a fresh process shows: `import stator` is light, a compilation leaves the rivals alone."""

import json
import subprocess
import sys
from typing import Any, Final

import pytest

from tests.style.tree import ROOT

HEAVY: Final = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch.fx.experimental",
    "sympy",
    "scipy",
    "rich",
    "typer",
    "jinja2",
    "llvmlite",
    "triton",
)

MODULES_ADDED: Final = """
import json, sys
import torch
before = set(sys.modules)
import stator
print(json.dumps(sorted(set(sys.modules) - before)))
"""

# Which of the rivals' functions run while a model is compiled, trained for one step and called.
# Dynamo and make_fx use a few themselves: what those call with no compiler is taken away first.
RIVALS_CALLED: Final = """
import json, sys
import torch
from torch.fx.experimental.proxy_tensor import make_fx

FILES = (
    "/torch/_inductor/",
    "/torch/_functorch/_aot_autograd/",
    "/torch/_functorch/aot_autograd.py",
    "/torch/_functorch/partitioners.py",
    "/torch/_functorch/compilers.py",
    "/torch/_functorch/fx_minifier.py",
)

def called(backend):
    torch._dynamo.reset()
    seen = set()

    def note(frame, event, argument):
        code = frame.f_code
        file = code.co_filename.replace("\\\\", "/")
        if event == "call" and any(part in file for part in FILES):
            seen.add(f"{file.rpartition('/torch/')[2]}:{code.co_qualname}")

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    compiled = torch.compile(model, backend=backend)
    sys.setprofile(note)
    try:
        compiled(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            compiled(torch.ones(2, 4))
        make_fx(model)(torch.ones(2, 4))
    finally:
        sys.setprofile(None)
    return seen

heard = {}
for backend in ("stator", "aot_eager"):
    called(backend)  # once unheard: importing a module calls its functions too
    heard[backend] = called(backend)
alone = called("eager")
print(json.dumps({backend: sorted(names - alone) for backend, names in heard.items()}))
"""


def printed(script: str) -> Any:
    """Run `script` in a fresh Python; what it prints."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def heard() -> dict[str, list[str]]:
    """By backend, the rivals' functions that a compilation calls: ours first, in one process."""
    names: dict[str, list[str]] = printed(RIVALS_CALLED)
    return names


def test_importing_stator_imports_nothing_heavy() -> None:
    added = printed(MODULES_ADDED)

    assert "stator" in added
    assert [name for name in added if name.startswith(HEAVY)] == []


def test_a_compilation_calls_no_function_of_a_rival(heard: dict[str, list[str]]) -> None:
    assert heard["stator"] == []


def test_the_listener_hears_a_rival(heard: dict[str, list[str]]) -> None:
    assert any("aot_autograd" in name for name in heard["aot_eager"])
