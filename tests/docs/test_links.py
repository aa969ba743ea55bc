"""Links between documents resolve, and files that documents name exist."""

import re

import pytest

from docs.markdown import CODE, DOCUMENTS, ROOT, anchors, without_blocks

LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"[\w.-]+(/[\w.-]+)+\.(py|md|json|toml|gguf|svg)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path):
    for target in LINK.findall(path.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name) if name else path
        assert file.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(file.read_text("utf-8")), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(path):
    lines = [line for line in without_blocks(path).splitlines() if "to come" not in line]
    named = {code for line in lines for code in CODE.findall(line) if FILE.fullmatch(code)}
    missing = {name for name in named if not (ROOT / name).exists() and not (path.parent / name).exists()}
    assert not missing, f"{path.name} names files that do not exist: {sorted(missing)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_part_of_a_page_stands_twice(path):
    lines = without_blocks(path).splitlines()
    prose = [line for line in lines if len(line) > 60 and not line.startswith("|")]
    twice = sorted({line for line in prose if prose.count(line) > 1})
    assert not twice, f"{path.name} has lines twice: {twice[:3]}"
