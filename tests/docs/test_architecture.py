"""docs/architecture.md against the tree of files: a line for each, no dead line, and doors that exist."""

import re

from docs.markdown import CODE, ROOT, read, rows, section

TEXT = read("docs/architecture.md")
ROOMS = ("slots", "ordering", "retrieval", "models", "server", "front", "bench")
KINDS = {
    "a sampling parameter",
    "a route",
    "an eviction policy",
    "a storage tier",
    "a tool-call format",
    "a GPU cost",
    "a page",
    "a document format",
}


def described():
    """Each file with a line, in order."""
    for folder, part in re.findall(r"^### `([\w/]+)/`\n(.*?)(?=^##)", TEXT, re.M | re.S):
        for cells in rows(part):
            assert len(cells) == 2 and cells[1], f"{folder}: {cells}"
            yield f"{folder}/{cells[0].strip('`')}"


def test_every_file_has_one_line():
    lines = list(described())
    assert len(lines) == len(set(lines)), "a file has two lines"
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path.name != "__init__.py"]
    files = {str(path.relative_to(ROOT)) for path in paths}
    missing, dead = files - set(lines), set(lines) - files
    assert not missing, f"docs/architecture.md, section Files: add a line for {sorted(missing)}"
    assert not dead, f"docs/architecture.md, section Files: remove the line of {sorted(dead)}"


def test_each_kind_of_extension_has_a_door():
    doors = dict(rows(section(TEXT, "## Doors")))
    assert set(doors) == KINDS
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
        "draft model",
        "images",
        "TLS",
        "wheels",
        "macOS",
        "Windows",
        "ARM",
        "conversations",
        "old",
    ):
        assert any(subject in known for known in states), subject
