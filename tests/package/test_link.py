"""The system's linker: what it is given, and what it writes down."""

from __future__ import annotations

import pytest

from stator.codegen.llvm.jit import compile_text
from stator.errors import CompileError
from stator.package.link import find_linker, link

TEXT = """
declare i32 @aoti_torch_delete_tensor_object(ptr)
define i32 @stator_open(ptr %it) {
  %code = call i32 @aoti_torch_delete_tensor_object(ptr %it)
  ret i32 %code
}
define void @hidden() {
  ret void
}
"""


def linker() -> str:
    """The one of this machine."""
    return find_linker() or pytest.skip("there is no linker")


def test_a_library_names_torchs_and_exports_what_others_call() -> None:
    made = link(linker(), [compile_text(TEXT)])
    assert made.startswith(b"\x7fELF")
    for name in (b"libtorch_cpu.so", b"stator_open", b"aoti_torch_delete_tensor_object"):
        assert name in made
    assert made == link(linker(), [compile_text(TEXT)])


def test_what_the_linker_says_is_the_error() -> None:
    with pytest.raises(CompileError, match="failed"):
        link(linker(), [b"no object file"])
