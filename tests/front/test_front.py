"""`slotcache order` in front of a real engine: what it changes in a request, and what it learns from the answer."""

from slotcache.ordering.document import Document
from slotcache.ordering.prompt import document_text

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")
DOCUMENTS = {name: {"id": name, "text": f"The report about {name} says it all. " * 8} for name in NAMES}


def documents(*names):
    return [DOCUMENTS[name] for name in names]


def text_of(*names):
    return "".join(document_text(Document(name, DOCUMENTS[name]["text"])) for name in names)


def cached(answer):
    return answer.json()["timings"]["cache_n"]


def order_of(answer):
    return answer.headers["x-slotcache-order"]


def test_documents_become_text_in_front_of_the_question(front, engine):
    answer = front.chat("Which?", documents=documents("alpha", "beta"), cache_scope="text")
    pasted = engine.chat(text_of("alpha", "beta") + "Which?", max_tokens=4, ignore_eos=False, cache_scope="text 2")
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == pasted["usage"]["prompt_tokens"]
    assert answer.json()["choices"][0]["message"] == pasted["choices"][0]["message"]


def test_the_order_follows_the_cache(front):
    first = front.chat("One?", documents=documents("alpha", "beta", "gamma"), cache_scope="order")
    second = front.chat("Two?", documents=documents("delta", "beta", "alpha"), cache_scope="order")
    assert order_of(first) == "rank; order=1,2,3; repeated=0; expected=0/3"
    assert order_of(second) == "cached; order=3,2,1; repeated=0; expected=2/3"
    assert cached(second) > 0.5 * second.json()["usage"]["prompt_tokens"] > 0 == cached(first)
