"""docs/architecture.md against the tree of files: doors that exist."""

import re

from docs.markdown import CODE, ROOT, read, rows, section

TEXT = read("docs/architecture.md")


def test_the_page_fits_on_a_few_screens():
    assert len(TEXT.splitlines()) <= 150


def test_each_kind_of_extension_has_a_door():
    doors = dict(rows(section(TEXT, "## Doors")))
    assert len(doors) > 10
    for kind, door in doors.items():
        paths = [code for code in CODE.findall(door.partition("to come")[0]) if "/" in code]
        assert paths or "to come" in door, kind
        missing = {path for path in paths if not (ROOT / path).exists()}
        assert not missing, f"the door for {kind} does not exist: {sorted(missing)}"


def test_each_name_in_a_row_is_in_one_of_its_files():
    _, *path = re.split(r"^\d+\. ", section(TEXT, "## A reading path"), flags=re.M)
    assert len(path) == 12
    for row in (*path, *(door for _, door in rows(section(TEXT, "## Doors")))):
        codes = CODE.findall(row)
        files = [ROOT / code for code in codes if code.endswith(".py") and (ROOT / code).exists()]
        known = {name for file in files for name in re.findall(r"\w+", file.read_text("utf-8"))}
        names = {code for code in codes if re.fullmatch(r"\w+(?:\.\w+)*", code) and not code.endswith(".py")}
        unknown = {name for name in names if not set(name.split(".")) <= known}
        assert not unknown, f"none of {', '.join(str(file.relative_to(ROOT)) for file in files)} has {sorted(unknown)}"


def test_what_is_out_says_so():
    states = {subject: state for subject, state in rows(section(TEXT, "## Out, or to come"))}
    assert all(re.match("out: |to come: |to come$|out$", state) for state in states.values()), states
    for subject in (
        "several models",
        "multi-token",
        "images",
        "wheels",
        "macOS",
        "Windows",
        "ARM",
        "conversations",
        "old",
    ):
        assert any(subject in known for known in states), subject
