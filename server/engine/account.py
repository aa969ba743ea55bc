"""The figures of a request for the log: how much was reused, why not more, and how fast it was. None of its text."""

from __future__ import annotations

from collections.abc import Sequence

from .events import End
from .generation import Generation
from .report import Fields, Report


def account(generations: Sequence[Generation]) -> Fields:
    """Return the figures of a request's generations. Of several, the prompt's are those of the first that has ended."""
    ends = [(generation, generation.final) for generation in generations if isinstance(generation.final, End)]
    finish: Fields = {"finish": ", ".join(dict.fromkeys(_finish(generation) for generation in generations))}
    if not ends:
        return finish
    generation, end = ends[0]
    report, steps = end.report, end.report.num_generated - 1
    return {
        "prompt": report.num_prompt,
        "cached": report.num_cached,
        "source": report.source,
        **_miss(generation, report),
        "generated": sum(end.report.num_generated for _, end in ends),
        "ttft_ms": round(1000 * (report.queue_time + report.prompt_time), 1),
        "tokens_per_second": round(steps / report.generation_time, 1) if steps > 0 else None,
        **({"choices": len(generations)} if len(generations) > 1 else {}),
        **finish,
    }


def _finish(generation: Generation) -> str:
    """Return how a generation ended."""
    if generation.final is None:
        return "cancelled"
    return generation.final.reason if isinstance(generation.final, End) else "error"


def _miss(generation: Generation, report: Report) -> Fields:
    """Return where reuse ended, and in what part of the prompt. A document's id is the client's text, and is left out."""
    layout = generation.request.layout
    if report.miss is None or layout is None:
        return {}
    at = report.miss["at"]
    in_document = any(document.start <= at < document.stop for document in layout.documents)
    part = "a document" if in_document else layout.segment_at(at)
    return {"miss": generation.no_cache_reason or part, "miss_at": at}
