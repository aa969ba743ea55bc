"""A hypothesis state machine over a real server with the embedded model: lives of conversations, as clients lead them.

Every prompt must be exactly what the model of `chat_model.py` says, and every answer what a server says that caches
nothing. SLOTCACHE_CHAT_LIVES says how many lives: a few, some seconds, if it is not set.
"""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from slotcache.models.demo import FILE
from slotcache.ordering.document import Document
from support.chat_client import PATH, Answer, ChatClient
from support.chat_model import Ask, Entry, Message, Turn, World
from support.chat_reference import Reference, reference
from support.chat_wishes import CORPUS, PAGES, WISHES, Talk, Wish

from server.conftest import running

LIVES = int(os.environ.get("SLOTCACHE_CHAT_LIVES", "4"))
QUEUE_MS = 5000.0  # generous: a few short requests are all that there is to wait for
LONGEST = 7000  # characters of a talk, some 2,500 tokens of a context of 4,096
MOST_TURNS = 20  # of a history that a client brings along
SURE = {"temperature": 0, "ignore_eos": False}  # behind its end an answer is noise, which roundings decide
SEEN: Counter[str] = Counter()  # over all lives
EXPECTED = {
    *("own", "fork", "host", "none", "moved", "repeated", "kept", "edited", "branched", "left", "sampled", "not cached"),
    *("burst", "brought along", "warmed", "speculated", "drop cache", "drop conversation", "with 1 slots"),
}


@pytest.fixture(scope="module", autouse=True)
def other() -> Iterator[Reference]:
    """One reference server for all lives."""
    with reference() as Chats.reference:
        yield Chats.reference


class Chats(RuleBasedStateMachine):
    reference: Reference

    @initialize(
        slots=st.integers(1, 3),
        cache_ram=st.sampled_from([1, 2, 64]),
        idle_prefill=st.booleans(),
        idle_sets=st.sampled_from([0, 0, 6]),
        window=st.sampled_from([0, 8]),
        exact=st.booleans(),
    )
    def start(self, exact, **changed):
        """exact: one thing at a time and room for all of it, so that a first answer may be drawn by lot."""
        self.exact = exact
        if exact:
            changed["cache_ram"] = 64
        self.stack = ExitStack()
        names = {"slots": "parallel"}
        changed = {names.get(name, name): value for name, value in changed.items()}
        self.client = ChatClient(self.stack.enter_context(running(FILE, ctx_size=4096, **changed)))
        self.world = World()
        self.talks: list[Talk] = []
        self.names = itertools.count()
        self.story = [f"exact={exact} {changed}"]  # what was done
        SEEN[f"with {changed['parallel']} slots"] += 1

    # ---- what clients do -------------------------------------------------------------------------------------------

    @rule(wishes=st.lists(WISHES, min_size=1, max_size=3), at_once=st.sampled_from([False, False, True]))
    def ask(self, wishes, at_once):
        """One after the other, or all at once, each in a talk of its own."""
        if self.exact or not at_once:
            for wish in wishes:
                self.converse([(self.talk(wish), wish)])
            return
        SEEN["burst"] += len(wishes) > 1
        self.converse([(talk, wish) for talk, wish in {id(talk): (talk, wish) for wish in wishes
                                                       for talk in [self.talk(wish)]}.values()])  # fmt: skip

    @rule(wish=WISHES, number=st.integers(2, MOST_TURNS))
    def bring_along(self, wish, number):
        """A client comes with a long history that was made elsewhere, a document in each turn, and asks twice."""
        SEEN["brought along"] += 1
        talk = Talk(wish.scope, "", [])
        for at in range(number):
            one = CORPUS.questions[at]
            found = CORPUS.documents[one.document]
            page = Document(f"{found.id}-{at}", found.text, found.title)
            talk.messages += [Message("user", one.question, (page,)), Message("assistant", one.answer)]
        self.talks.append(talk)
        for _ in range(2):
            history = list(talk.messages)
            self.converse([(talk, wish)])
            talk.messages = history

    @rule(of=st.integers(1, 3), at=st.integers(0, 5), how=st.sampled_from(["text", "documents", "cut", "take back"]))
    @precondition(lambda self: self.talks)
    def edit(self, of, at, how):
        """A client changes what was said, for its next whole history."""
        messages = self.talks[-min(of, len(self.talks))].messages
        at = at % max(len(messages), 1)
        if how == "take back":
            del messages[-2:]
        elif how == "cut" and len(messages) > 2:
            del messages[at : at + 2]
        elif messages:
            is_user = messages[at].role == "user"
            changed = (
                {"text": "Who is the mayor of Osselby?"} if how == "text" or not is_user else {"documents": (PAGES[1],)}
            )
            messages[at] = replace(messages[at], **changed)
        SEEN["edited"] += 1

    @rule(wish=WISHES, after=st.integers(0, 4))
    def disconnect(self, wish, after):
        """A client goes away in the middle of a stream: the conversation stays as it was."""
        talk = self.talk(wish)
        ask = self.asked(talk, replace(wish, options=wish.options | {"max_tokens": 500, "ignore_eos": True, "stop": []}))
        self.world.turn(ask)
        self.story.append(f"left after {after} events: {json.dumps(ask.body())}")
        if self.client.disconnect(ask.body(), after):
            SEEN["left"] += 1
        elif ask.conversation:  # it was whole before that, and is remembered under an id that nobody knows
            self.client.http.delete(f"/v1/conversations/{ask.conversation}", params={"scope": ask.scope})
            self.world.forget(ask.scope, ask.conversation)
            self.talks.remove(talk)

    @rule(wish=WISHES, how=st.sampled_from(["warm", "pin", "speculate", "speculate", "give up"]), comes=st.booleans())
    def ahead(self, wish, how, comes):
        """A turn is computed ahead; then it comes, or another one."""
        talk = self.talk(wish)
        body = self.asked(talk, wish).body()
        self.story.append(f"{how} {json.dumps(body)}")
        if how in ("warm", "pin"):
            said = self.client.warm(body | {"pin": how == "pin"} | ({"ttl": 60} if how == "pin" else {}))
            SEEN["warmed"] += said["slotcache"]["cached_tokens"] < said["prompt_tokens"]
        else:
            SEEN["speculated"] += self.client.post("/v1/speculate", body | {"id": "s"})["state"] == "started"
        if how == "give up":
            self.client.http.delete("/v1/speculate", params={"id": "s", "scope": wish.scope})
        if comes:
            self.converse([(talk, wish)])

    @rule(what=st.sampled_from(["cache", "cache", "conversation"]), of=st.integers(1, 3))
    @precondition(lambda self: self.talks)
    def drop(self, what, of):
        talk = self.talks[-min(of, len(self.talks))]
        self.story.append(f"drop {what} of {talk.name!r} in {talk.scope!r}")
        if what == "cache":
            assert self.client.http.delete("/v1/cache", params={"scope": talk.scope}).status_code == 200
        elif talk.name:
            status = self.client.http.delete(f"/v1/conversations/{talk.name}", params={"scope": talk.scope}).status_code
            assert status == (200 if self.world.forget(talk.scope, talk.name) else 404)
        SEEN[f"drop {what}"] += 1

    @rule()
    def rest(self):
        """Time in which the server may compute what comes next."""
        self.client.rest()

    # ---- how it is judged ------------------------------------------------------------------------------------------

    def talk(self, wish: Wish) -> Talk:
        """The talk that a wish is about, or a new one."""
        known = self.talks[-min(wish.of, len(self.talks))] if wish.of and self.talks else None
        if known and known.length < LONGEST:
            return known
        opening = [Message("system", "Answer from the documents.")] if "instructed" in wish.opening else []
        self.talks.append(Talk(wish.scope, f"talk {next(self.names)}" if "named" in wish.opening else "", opening))
        return self.talks[-1]

    def asked(self, talk: Talk, wish: Wish) -> Ask:
        """The request: the whole history, what is new in a conversation, or what is new after an answer."""
        if not self.exact:
            wish = replace(wish, options=wish.options | SURE | {"stop": []})
        elif talk.answers:  # their KV was computed token by token, the other server's was not: bits differ
            wish = replace(wish, options=wish.options | SURE)
        new = Message("user", wish.question, wish.documents or None)
        known = [id for id in talk.answers if id in self.world.scope(talk.scope).of_answer]
        if wish.manner == "branch" and known:
            SEEN["branched"] += 1
            return Ask(talk.scope, (new,), wish.options, previous=known[len(wish.question) % len(known)], store=wish.store)
        if wish.manner == "new" and talk.name:
            opening = tuple(talk.messages) if len(talk.messages) == 1 else ()
            return Ask(talk.scope, (*opening, new), wish.options, talk.name, "auto" if opening else "new", store=wish.store)
        history = [replace(one, documents=None) for one in talk.messages] if "silent" in wish.manner else talk.messages
        return Ask(talk.scope, (*history, new), wish.options, talk.name, "whole", store=wish.store)

    def converse(self, pairs: list[tuple[Talk, Wish]]) -> None:
        """Ask, all at once, and compare every answer with what it should be."""
        if self.exact:
            self.client.rest()
        turns = [self.world.turn(self.asked(talk, wish)) for talk, wish in pairs]
        self.story += [f"POST {PATH} {json.dumps(turn.ask.body())}" for turn in turns]
        with ThreadPoolExecutor(len(pairs)) as threads:
            sent = [threads.submit(self.client.ask, turn.ask.body(), wish.stream)
                    for turn, (_, wish) in zip(turns, pairs, strict=True)]  # fmt: skip
        answers = [one.result() for one in sent]
        histories = [self.judged(*pair) for pair in zip(turns, answers, strict=True)]
        for (talk, wish), turn, answer, entries in zip(pairs, turns, answers, histories, strict=True):
            self.world.remember(turn, entries, answer.id, answer.report)
            talk.messages += [Message("user", wish.question, wish.documents or None), Message("assistant", answer.text)]
            talk.answers.append(answer.id)

    def judged(self, turn: Turn, answer: Answer) -> tuple[Entry, ...]:
        """As `judge`, and a failure tells the whole story: hypothesis does not where time played a part."""
        try:
            return self.judge(turn, answer)
        except AssertionError as error:
            error.add_note("\n".join(self.story))
            raise

    def judge(self, turn: Turn, answer: Answer) -> tuple[Entry, ...]:
        """The entries of the turn and its answer."""
        entries = turn.placed(answer.documents)
        assert list(answer.repeated) == turn.repeated
        prompt = self.world.ids(turn.ask.scope, entries, self.reference.cut)
        assert answer.prompt_tokens == len(prompt), "the prompt is another one"
        said = self.reference.answer(prompt, turn.ask.options)
        assert (answer.text, answer.reason, answer.completion_tokens) == (said.text, said.reason, said.num_tokens)
        assert answer.queue_ms <= QUEUE_MS
        assert turn.ask.caches or answer.cached_tokens == 0
        self.note(turn, entries, answer)
        return (*entries, Entry("assistant", answer.text, sampled=said.ids if said.spells else None))

    def note(self, turn: Turn, entries: tuple[Entry, ...], answer: Answer) -> None:
        SEEN[answer.source] += 1
        SEEN["moved"] += any(one.shown and one.shown.order != one.shown.rank for one in entries)
        SEEN["repeated"] += bool(answer.repeated)
        SEEN["kept"] += turn.num_kept > 0
        SEEN["sampled"] += turn.ask.options["temperature"] > 0
        SEEN["not cached"] += not turn.ask.caches

    def teardown(self):
        if not hasattr(self, "client"):
            return
        with self.stack:
            self.client.settle()
            for scope in {talk.scope for talk in self.talks}:
                for talk in self.talks:
                    if talk.name and talk.scope == scope:
                        self.client.http.delete(f"/v1/conversations/{talk.name}", params={"scope": scope})
                self.client.http.delete("/v1/cache", params={"scope": scope})
                left = self.client.http.get("/v1/cache", params={"scope": scope}).json()
                assert left["runs"] == [], "something is cached after all was dropped"


TestChats = pytest.mark.timeout(900 + 20 * LIVES)(Chats.TestCase)
TestChats.settings = settings(
    max_examples=LIVES, stateful_step_count=10, deadline=None, suppress_health_check=list[Any](HealthCheck)
)


def test_those_lives_had_everything_that_can_happen():
    if LIVES < 100 or not SEEN:
        pytest.skip("looks back on the lives above: SLOTCACHE_CHAT_LIVES=100 or more")
    assert {name for name in EXPECTED if not SEEN[name]} == set()
