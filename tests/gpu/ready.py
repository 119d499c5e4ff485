"""What a machine may lack that runs these files: an installed Stator, and what torch tests by."""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest


def register_backend() -> None:
    """Make `backend="stator"` known, where the package is not installed but on the path."""
    import torch

    from stator.backend import compile_fx

    if "stator" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(compile_fx, name="stator")


def stand_in_for_expecttest() -> None:
    """Torch's database of operators imports expecttest, and uses nothing of it."""
    if importlib.util.find_spec("expecttest") is None:
        module = types.ModuleType("expecttest")
        module.__dict__.update(TestCase=unittest.TestCase, ACCEPT=False)
        sys.modules["expecttest"] = module
