"""Fills docs/tour.md with what the compiler says: prose is written by hand, excerpts are not.

An excerpt stands behind a comment that names the dump it is from:

    <!-- dump: forward_kernels.txt -->
    <!-- dump: forward.ll, the loop with @stator_exp_f32 -->
    <!-- dump: forward.ll, as assembly -->

`python -m docs.tour` (or `make docs`) writes all of them anew.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

import stator

TOUR: Final = Path(__file__).with_name("tour.md")
# Assembly is made for one processor, so that the page is the same wherever it is written.
TRIPLE, PROCESSOR = "x86_64-unknown-linux-gnu", "skylake-avx512"

_EXCERPT: Final = re.compile(
    r"(?P<head><!-- dump: (?P<file>[\w.*]+)(?:, (?P<part>.*?))? -->\n```\w+\n).*?(?=^```$)",
    re.MULTILINE | re.DOTALL,
)


def dumps(folder: Path) -> dict[str, str]:
    """Texts of one compilation, by file name."""
    x = torch.zeros(64, 256, requires_grad=True)
    torch.compiler.reset()
    compiled = stator.compile(lambda x: x.softmax(-1), strict=True, dump_dir=folder, dynamic=False)
    result = compiled(x)
    result.backward(torch.ones_like(result))
    return {file.name: file.read_text() for file in folder.glob("*/*")}


def filled(page: str, texts: dict[str, str]) -> str:
    """The page with every excerpt taken from `texts`."""

    def excerpt(found: re.Match[str]) -> str:
        pattern = re.compile(re.escape(found["file"]).replace(r"\*", r"\w+"))
        text = next(texts[name] for name in sorted(texts) if pattern.fullmatch(name))
        return f"{found['head']}{part_of(text, found['part']).strip()}\n"

    return _EXCERPT.sub(excerpt, page)


def part_of(text: str, part: str | None) -> str:
    """What a comment asks for: all of a text, or a loop or block of LLVM's."""
    if part is None:
        return text
    if part == "as assembly":
        return hot_loop(assembly(text))
    kind, _, word = part.removeprefix("the ").partition(" with ")
    blocks = re.split(r"^(?=\w+:$)", text, flags=re.MULTILINE)
    return next(b for b in blocks if word in b and (kind == "block" or "phi i64" in b))


def assembly(text: str) -> str:
    """Assembly of LLVM text for one processor, whatever this machine is."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(TRIPLE)
    machine: Any = target.create_target_machine(cpu=PROCESSOR, opt=3)
    module = llvm.parse_assembly(text)
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = True
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return str(machine.emit_assembly(module))


def hot_loop(text: str) -> str:
    """The vector loop with the polynomial of `exp`, from its label to the jump back."""
    blocks = re.split(r"^(?=\.LBB\w+:)", text, flags=re.MULTILINE)
    found = next(block for block in blocks if "vfmadd" in block and "zmm" in block)
    lines = [line.split("#")[0].rstrip().expandtabs(8) for line in found.splitlines()]
    code = [line for line in lines if line.strip() and not line.strip().startswith(".p2align")]
    label = code[0].rstrip(":")
    return "\n".join(code[: 1 + next(n for n, line in enumerate(code) if f" {label}" in line)])


def tour(page: str) -> str:
    """The page with its excerpts made anew."""
    with tempfile.TemporaryDirectory() as folder:
        return filled(page, dumps(Path(folder)))


if __name__ == "__main__":
    TOUR.write_text(tour(TOUR.read_text(encoding="utf-8")), encoding="utf-8")
