"""Every exception class."""

from __future__ import annotations


class StatorError(Exception):
    """Something the user can act on: what happened, where, and what to do next."""

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what = what
        self.where = where
        self.hint = hint
        lines = [what]
        if where:
            lines.append(f"  at: {where}")
        if hint:
            lines.append(f"  next: {hint}")
        super().__init__("\n".join(lines))


class OptionError(StatorError, ValueError):
    """An option that does not exist, or a value it cannot have."""


class MemoryLimitError(OptionError):
    """A memory limit that no way to run the program meets."""


class CompileError(StatorError):
    """A graph that could not be compiled, with the stage that gave up."""

    def __init__(
        self, stage: str, what: str, *, where: str | None = None, hint: str | None = None
    ) -> None:
        self.stage = stage
        super().__init__(f"{stage}: {what}", where=where, hint=hint)


class Unsupported(CompileError):  # noqa: N818  says what it is, like NotImplemented
    """A program that eager runs and Stator does not compile yet."""


class VerifyError(CompileError):
    """A pass left a graph that breaks an invariant: a bug of ours, found before it runs."""


class WrongResult(StatorError):  # noqa: N818  says what it is
    """A kernel that computes something else than eager: a bug of ours, found while it runs."""


class StatorWarning(UserWarning):
    """A graph runs in eager mode, with the reason."""


class PackageError(StatorError):
    """A package that is not used: damaged, changed, or for another machine."""

    def __init__(self, path: object, what: str, *, hint: str | None = None) -> None:
        super().__init__(what, where=str(path), hint=hint)
