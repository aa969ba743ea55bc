"""The page: files of this package that a browser shows, with the headers that keep it to this server alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError

FOLDER = Path(__file__).parents[1] / "page"
FIRST = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

# What a browser may do with the page. Scripts and styles come from this server's files only; no text can become a script:
# `innerHTML` and the like take only what DOMPurify has made (Trusted Types).
POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a browser keeps the files, and asks whether they changed
}


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page. tag: its ETag."""

    content: bytes
    kind: str
    tag: str


@cache
def files() -> dict[str, File]:
    """Return the files of the page by their paths in its folder."""
    found = sorted(path for path in FOLDER.rglob("*") if path.suffix in KINDS)
    return {path.relative_to(FOLDER).as_posix(): _read(path) for path in found}


async def show(request: Request) -> Response:
    """Show the page in a browser, or a file of it."""
    file = files().get(request.path_params.get("path", FIRST))
    if file is None:
        raise RequestError(f"no such route: {request.url.path}", status=404)
    headers = HEADERS | {"ETag": file.tag}
    if file.tag in map(str.strip, request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers | {"Content-Type": file.kind})


def _read(path: Path) -> File:
    content = path.read_bytes()
    return File(content, KINDS[path.suffix], f'"{blake2b(content, digest_size=12).hexdigest()}"')
