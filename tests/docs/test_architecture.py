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
