"""Print the size of each part of the package beside its budget: a compass, not a limit."""

from typing import Final

from tests.style.tree import PACKAGE, files_under

# Lines, by folder; "." stands for the modules at the package's root.
BUDGETS: Final = {
    ".": 700,
    "core": 800,
    "ops": 2500,
    "graph": 1300,
    "passes": 2500,
    "rules": 800,
    "aot": 2500,
    "loops": 2000,
    "lower": 600,
    "schedule": 1500,
    "codegen": 3200,
    "runtime": 1000,
    "cache": 600,
    "package": 900,
    "debug": 1500,
}


def line_counts() -> dict[str, int]:
    """Lines of Python in each part of the package."""
    counts = dict.fromkeys(BUDGETS, 0)
    for path in files_under(PACKAGE, "*.py"):
        below = path.relative_to(PACKAGE).parts
        part = below[0] if len(below) > 1 else "."
        counts[part] = counts.get(part, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return counts


def main() -> None:
    """Print the parts that exist, and the sum."""
    counts = line_counts()
    print(f"{'lines':>7} {'budget':>7}  part of src/stator")
    for part, lines in counts.items():
        if lines:
            budget = BUDGETS.get(part, 0)
            over = "  over: look for what to delete" if lines > budget else ""
            print(f"{lines:>7} {budget:>7}  {part}{over}")
    print(f"{sum(counts.values()):>7} {sum(BUDGETS.values()):>7}  in all")


if __name__ == "__main__":
    main()
