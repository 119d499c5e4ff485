"""Names, comments and prose: what no file of the repository may hold."""

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.style.tree import ROOT, code_files, markdown_files, shown, text_files

# Names that say nothing of what is inside.
EMPTY_NAMES: Final = frozenset({"utils", "util", "common", "base", "misc", "helpers", "stuff"})
OPEN_WORK: Final = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")
MACHINE: Final = re.compile(r"(?<![\w.])(?:/(?:home|Users|root|work|opt|mnt|srv)/\w|[A-Z]:\\Users)")
REGISTRY: Final = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|npmjs\.org")
FENCED: Final = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING: Final = re.compile(r"^#+\s+(.*?)\s*$", re.MULTILINE)


def open_work(path: Path) -> Iterator[str]:
    """Each comment that defers work without an issue's number."""
    if not OPEN_WORK.search(path.read_text(encoding="utf-8")):
        return  # nowhere in the file, so in no comment: telling comments apart takes long
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and OPEN_WORK.search(token.string):
                yield f"line {token.start[0]}: {token.string}"


def anchors(markdown: str) -> set[str]:
    """The anchors of a Markdown text's headings, as its viewers form them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(FENCED.sub("", markdown))
    }


def broken_links(markdown: str, folder: Path) -> Iterator[str]:
    """Each link of the text that leads to no file or heading of the repository."""
    for inline, defined in LINK.findall(FENCED.sub("", markdown)):
        link = inline or defined
        if re.match(r"[a-z]+:", link):
            continue  # another site's page: not ours to keep
        target, _, anchor = link.partition("#")
        file = folder / target
        if target and not file.exists():
            yield link
        elif anchor:
            text = file.read_text(encoding="utf-8") if target else markdown
            if anchor not in anchors(text):
                yield link


@pytest.mark.parametrize("path", code_files(), ids=shown)
def test_module_names_say_something(path: Path) -> None:
    assert EMPTY_NAMES.isdisjoint({path.stem, *path.relative_to(ROOT).parts})


@pytest.mark.parametrize("path", code_files(), ids=shown)
def test_deferred_work_names_its_issue(path: Path) -> None:
    assert list(open_work(path)) == []


def test_deferred_work_without_an_issue_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("a = 'TODO'  # TODO(#12): fine\nb = 1  # TODO: some day\n")

    assert list(open_work(file)) == ["line 2: # TODO: some day"]


@pytest.mark.parametrize("path", text_files(), ids=shown)
def test_no_path_of_one_machine_and_no_registry(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert MACHINE.findall(text) == []
    assert REGISTRY.findall(text) == []


def test_a_path_of_one_machine_is_found() -> None:
    assert MACHINE.search(f"see {'/'.join(['', 'home', 'ann', 'notes'])}")
    assert not MACHINE.search("#!/usr/bin/env bash, a/home/b, https://host/home/x")


@pytest.mark.parametrize("path", markdown_files(), ids=shown)
def test_links_resolve(path: Path) -> None:
    assert list(broken_links(path.read_text(encoding="utf-8"), path.parent)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# The one `heading`\n```\n[x](inside-a-fence.md)\n```\n")
    text = "[a](there.md#the-one-heading) [b](there.md#none) [c](gone.md)\n\n[d]: lost.md\n"

    assert list(broken_links(text, tmp_path)) == ["there.md#none", "gone.md", "lost.md"]
