"""Writes folders of documents for a server, and reads their state through its routes."""

from pathlib import Path

NOTES = {"tides.md": "# Tides\n\nThe moon raises two tides a day.\n", "deep/stone.txt": "The city of stone is old."}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def collection(server, **query):
    answer = server.http.get("/v1/sources", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["collections"][0]


def files(server):
    return {file["path"]: file for file in collection(server)["files"]}


def is_ready(server):
    return collection(server)["state"] == "ready"
