"""docs/api.md, docs/ollama.md and docs/metrics.md against the server: routes, fields, defaults, errors, the report."""

import ast
import json
import re
from dataclasses import fields

from slotcache.models.sampling_params import NUMBERS, Sampling
from slotcache.server.api.routes import ROUTES
from slotcache.server.http.api_errors import TYPES

from docs.markdown import CODE, ROOT, read, rows, section

API, OLLAMA, METRICS = read("docs/api.md"), read("docs/ollama.md"), read("docs/metrics.md")
ROUTE = re.compile(r"(GET|POST|DELETE) (/\S*)")
STATUS_OF_NO_TYPE = {500: "server_error"}


def first_codes(text):
    """The names in the first cell of each row, with the rest of the row."""
    return [(name, cells[1:]) for cells in rows(text) for name in CODE.findall(cells[0])]


def test_every_route_is_described(demo_server):
    real = {
        (method, route.path.replace(":path}", "}"))
        for route in demo_server.uvicorn.config.app.routes
        for method in route.methods - {"HEAD"}
    }
    described = set(ROUTE.findall("\n".join(CODE.findall(section(API, "## Routes")))))
    assert real - described == set(), "routes that docs/api.md lacks"
    assert described - real == set(), "routes of docs/api.md that the server lacks"


def test_every_field_of_a_body_is_described():
    real = {name for row in ROUTES if row.body for name in row.body.__struct_fields__}
    parts = re.split(r"^## ", API, flags=re.M)
    parts = [OLLAMA, *(part for part in parts if not part.startswith(("The report", "Errors", "Routes")))]
    described = {name for part in parts for name, _ in first_codes(part)}
    prose = {name for name in ("prompt",) if f"`{name}`" in API}
    assert real - described - prose == set(), "fields that docs/api.md and docs/ollama.md lack"
    assert described - real == set(), "fields of these pages that no body has"


def test_the_defaults_of_sampling_are_as_described():
    real = {field.name: field.default for field in fields(Sampling)}
    named = [(CODE.findall(cells[0]), cells[1]) for cells in rows(section(API, "## Fields of a completion"))]
    described = [(names, defaults) for names, defaults in named if {*names} <= real.keys()]
    numbers = {
        name: float(default)
        for names, defaults in described
        if {*names} <= NUMBERS.keys()
        for name, default in zip(names, defaults.split(", "), strict=True)
    }
    assert numbers == {name: real[name] for name in NUMBERS}
    (breakers,) = [default for names, default in described if names == ["dry_sequence_breakers"]]
    assert json.loads(breakers.strip("`")) == list(Sampling().dry_sequence_breakers)


def test_every_status_and_code_of_an_error_is_described():
    part = section(API, "## Errors")
    reported = [cells for cells in rows(part) if cells[0].isdecimal()]
    assert {int(status): kind.strip("`") for status, kind, _ in reported} == TYPES | STATUS_OF_NO_TYPE
    named = {name for *_, cause in reported for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", cause)}
    real = {
        keyword.value.value
        for path in (ROOT / "server").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str)
    }
    assert named == real


def test_the_report_is_as_described(demo_server):
    conversation = {"conversation": "report", "documents": ["A text of a document."]}
    report = demo_server.chat(**conversation, report_segments=True, retrieval=True)["slotcache"]
    separate = demo_server.chat(documents=["A text of a document."], documents_attention="separate")["slotcache"]
    report["documents_attention"] = separate["documents_attention"]
    for day in ("Monday", "Tuesday"):
        said = [
            {"role": "system", "content": f"{'You are careful. ' * 9}It is {day}."},
            {"role": "user", "content": "Hello"},
        ]
        report |= {"moved": demo_server.chat(messages=said, session_id="moved", volatile="move")["slotcache"].get("moved")}
    pasted = demo_server.chat('<context>\n<source id="1">A text.</source>\n</context>', documents_in_text="auto")
    report["documents_in_text"] = pasted["slotcache"]["documents_in_text"]
    for step in (1, -1):
        swapped = ["A text of a document.", "A text of another one."][::step]
        report |= {"reordered": demo_server.chat(documents=swapped, cache_scope="swapped")["slotcache"].get("reordered")}
    assert report["moved"] and report["reordered"]
    for name in ("index", "left_out"):  # described beside `retrieved`; the first is of folders that are still read
        report.pop(name, None)
    described = {name for name, _ in first_codes(section(API, "## The report"))}
    assert not set(report) - described, f"fields of the report that docs/api.md lacks: {sorted(set(report) - described)}"
    assert not described - set(report), f"fields of docs/api.md that no report here has: {sorted(described - set(report))}"


def kind_of(metric, meaning):
    """As docs/metrics.md says it: `_total` is a counter, the others are gauges, unless the row says otherwise."""
    if meaning.startswith("histogram: "):
        return "histogram"
    return "counter" if metric.endswith("_total") or "(counter)" in meaning else "gauge"


def test_every_metric_is_described(demo_server):
    demo_server.chat()
    lines = demo_server.http.get("/metrics").text.splitlines()
    real = {tuple(line.split()[2:4]) for line in lines if line.startswith("# TYPE")}
    real = {(name, kind) for name, kind in real if not name.endswith("_created")}
    described = {(name, kind_of(name, cells[0])) for name, cells in first_codes(METRICS)}
    assert real - described == set(), "metrics that docs/metrics.md lacks"
    assert described - real == set(), "metrics of docs/metrics.md that the server lacks"


def test_the_parts_of_labelled_metrics_are_described(demo_server):
    demo_server.chat()
    text = demo_server.http.get("/metrics").text
    row = next(cells for name, cells in first_codes(METRICS) if name == "slotcache_cached_tokens_total")
    assert set(re.findall(r'slotcache_cached_tokens_total{source="(\w+)"}', text)) == set(CODE.findall(row[0])) - {"source"}
