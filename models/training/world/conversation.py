"""Conversations about documents, with their answers: the material of training and measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from .chain import chains
from .page import Page, PageWriter, page_ids
from .question import Asked, Asker
from .recipe import Recipe
from .wording import SMALL_TALK, UNKNOWN, Attribute, Style
from .words import Words
from .world import LEAD, Thing, World

WHERE = frozenset({"place", "address"})


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn. sort: the kind of the question: plain, joined, follow, unknown or aside.

    documents: shown, in this order. above: ids of documents that the turn points to. rank: ids in order of relevance, () for
    no hint. located: whether the answer is in a document of an earlier turn. first: of a joined question, the sentence that
    the answer begins with, of another document than the rest.
    """

    question: str
    answer: str
    sort: str
    documents: tuple[Page, ...] = ()
    above: tuple[str, ...] = ()
    rank: tuple[str, ...] = ()
    located: bool = False
    first: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Reply:
    """The answer to a question; the fields are those of a Turn. page: the document that it is in."""

    answer: str
    sort: str
    page: Page | None = None
    first: str = ""


class Author:
    """Writes conversations by a recipe. The same generator state and recipe give the same conversation."""

    def __init__(self, rng: Random, words: Words, reserved: frozenset[str] = frozenset()) -> None:
        self._rng, self._words = rng, words
        self._world = World(rng, words, reserved)

    def write(self, recipe: Recipe) -> Conversation:
        """Return a conversation in a world of its own; its last question is a joined one if all are to be."""
        rng = self._rng
        system = self._words.pick(rng, "system") if rng.random() < recipe.system else ""
        while True:
            turns = tuple(_Talk(rng, self._world, recipe).turns())
            if recipe.joined < 1 or turns[-1].sort == "joined":
                return Conversation(system, turns)


class _Talk:
    """One conversation while it is written."""

    def __init__(self, rng: Random, world: World, recipe: Recipe) -> None:
        self._rng, self._world, self._recipe = rng, world, recipe
        self._style = Style(
            plain=recipe.plain,
            plain_questions=recipe.plain_questions,
            bare=recipe.bare,
            wordings=recipe.wordings,
            noise=recipe.noise,
            linked=recipe.linked,
        )
        self._asker = Asker(rng, self._style)
        self._pool: dict[int, list[Attribute]] = {}
        self._read: list[Page] = []  # pages of the conversation so far
        self._before: Asked | None = None

    def turns(self) -> list[Turn]:
        rng, recipe = self._rng, self._recipe
        num_turns = rng.randint(*recipe.turns)
        sizes = [rng.randint(*recipe.documents)]
        for _ in range(num_turns - 1):
            sizes.append(rng.randint(1, max(2, sizes[0])) if rng.random() < recipe.later else 0)
        fresh = self._pages(sum(sizes))
        turns = []
        for at, size in enumerate(sizes):
            if rng.random() < recipe.aside / num_turns:
                question, answer = rng.choice(SMALL_TALK)
                turns.append(Turn(question=question, answer=answer, sort="aside"))
            turns.append(self._turn(fresh, size, first=at == 0))
        return turns

    def _pages(self, count: int) -> list[Page]:
        """Return new pages, most of them about things of the same kind; sometimes two pages about one thing."""
        rng, world, recipe = self._rng, self._world, self._recipe
        main = world.kind(recipe.kinds)
        same = rng.choice((1.0, 1.0, 0.7, 0.3))
        things: list[Thing] = []
        while len(things) < count:
            like = rng.choice(things) if things and rng.random() < 0.12 * recipe.noise else None
            kind = like.kind if like else main if rng.random() < same else world.kind(recipe.kinds)
            thing = world.thing(kind, like)
            if any(thing.bare.lower() == other.bare.lower() for other in things):
                continue
            things.append(thing)
            if len(things) < count and rng.random() < 0.06 * recipe.noise:
                things.append(thing)
        ids, writer, pages = page_ids(rng, things, recipe.plain_questions), PageWriter(world), []
        unsaid: dict[int, list[Attribute]] = {}
        for thing, identity in zip(things, ids, strict=True):
            pool = self._attributes(thing)
            left = unsaid.setdefault(id(thing), rng.sample(pool, len(pool)))
            told, left[:] = left[: (size := min(rng.randint(*recipe.told), max(1, len(left) - 2)))], left[size:]
            thing.unsaid = left
            pages.append(writer.write(thing, told, identity, style=self._style, others=things))
        return pages

    def _attributes(self, thing: Thing) -> list[Attribute]:
        """Return the attributes that this conversation uses for things of this kind."""
        key = id(thing.kind)
        if key not in self._pool:
            never = self._rng.random() >= self._recipe.made_up * (0.5 if self._recipe.plain else 1.0)
            share = 0.0 if never else self._rng.choice((0.0, 0.2, 0.2, 0.5))
            self._pool[key] = self._world.attributes(thing.kind, self._rng.randint(5, 10), share, self._recipe.bare)
        return self._pool[key]

    def _turn(self, fresh: list[Page], size: int, first: bool) -> Turn:
        rng, recipe = self._rng, self._recipe
        again: list[Page] = []
        if size and self._read and rng.random() < recipe.repeat:
            again = rng.sample(self._read, min(len(self._read), rng.randint(1, 4)))
        new = [fresh.pop() for _ in range(max(size - len(again), 0 if again else 1))] if size else []
        found = new + again
        target = rng.choice(found if found and rng.random() < 0.85 else self._read + new)
        read_before = {id(page) for page in self._read}
        self._read += new
        shown, above = list(new), []
        if again and rng.random() < recipe.located:
            above = [page.id for page in again]
        else:
            shown += again
        rng.shuffle(shown)
        asked, reply = self._question(target, first)
        located = reply.page is not None and id(reply.page) in read_before and reply.page not in shown
        rank = self._rank([page.id for page in (found if rng.random() < 0.5 else shown)], target) if len(found) > 1 else ()
        self._before = asked
        return Turn(
            question=asked.text,
            answer=reply.answer,
            sort=reply.sort,
            documents=tuple(shown),
            above=tuple(above),
            rank=rank,
            located=located,
            first=reply.first,
        )

    def _rank(self, ids: list[str], target: Page) -> tuple[str, ...]:
        rng = self._rng
        if rng.random() >= self._recipe.hinted or len(ids) < 2:
            return ()
        rng.shuffle(ids)
        if target.id in ids and rng.random() < 0.5:
            ids.remove(target.id)
            ids.insert(0, target.id)
        return tuple(ids)

    def _question(self, target: Page, first: bool) -> tuple[Asked, _Reply]:
        rng, recipe, before = self._rng, self._recipe, self._before
        unknown = rng.random() < recipe.unknown
        if recipe.joined and rng.random() < recipe.joined and (joined := self._joined_question(unknown)):
            return joined
        if before and not first and rng.random() < recipe.follow:
            asked = self._next_question(before, unknown)
            if asked is not None:
                return asked, self._reply(asked, "follow")
        asked = self._unknown_question(target.thing) if unknown else self._known_question(target)
        return asked, self._reply(asked, "plain")

    def _reply(self, asked: Asked, sort: str) -> _Reply:
        page, sentence = self._find(asked)
        return _Reply(sentence, sort, page) if page else _Reply(UNKNOWN, "unknown")

    def _joined_question(self, unknown: bool) -> tuple[Asked, _Reply] | None:
        """Ask about a thing that another document names; None if no document of the conversation does."""
        rng = self._rng
        if not (found := chains(self._read)):
            return None
        chain = rng.choice(found)
        if unknown and rng.random() < 0.5 and (other := rng.choice(self._missing(chain.thing))).label:
            asked = self._asker.joined(replace(chain, attribute=other), rng.choice(self._attributes(chain.named)))
            return asked, _Reply(UNKNOWN, "unknown")
        told = [fact[0] for page in self._read if page.thing is chain.named for s in page.sentences for fact in s.facts]
        told = [attribute for attribute in told if attribute is not LEAD]
        choice = self._missing(chain.named) if unknown else told
        if not choice:
            return None
        asked = self._asker.joined(chain, rng.choice(choice))
        rest = self._reply(asked, "joined").answer
        return asked, _Reply(f"{chain.sentence.text} {rest}", "joined", first=chain.sentence.text)

    def _known_question(self, page: Page) -> Asked:
        rng = self._rng
        facts = [(sentence, *fact) for sentence in page.sentences for fact in sentence.facts]
        sentence, attribute, value = rng.choice(facts)
        if (
            not self._recipe.plain_questions
            and attribute.back
            and sentence.named
            and rng.random() < 0.2 * min(1.0, self._recipe.noise + 0.3)
        ):
            same = [p for p in self._read for s in p.sentences for a, v in s.facts if v.lower() == value.lower()]
            if len(same) == 1:
                return self._asker.backwards(page, attribute, value)
        return self._asker.full(page.thing, attribute, self._things())

    def _unknown_question(self, thing: Thing) -> Asked:
        """Ask for an attribute that is left unsaid, or about a thing without a page."""
        rng, world = self._rng, self._world
        if rng.random() < 0.6 and (missing := self._missing(thing)):
            return self._asker.full(thing, rng.choice(missing), self._things())
        taken = {other.bare.lower() for other in self._things()}
        like = thing if rng.random() < 0.4 else None
        stranger = world.thing(thing.kind, like)
        while stranger.bare.lower() in taken:
            stranger = world.thing(thing.kind)
        attribute = rng.choice(self._attributes(thing) + ([] if thing.kind.is_person else [LEAD]))
        # Never by a part of the name: it might be part of another name, too.
        return self._asker.full(
            stranger, attribute, [*self._things(), stranger, Thing(thing.kind, stranger.name, stranger.noun, ("", "", ""))]
        )

    def _missing(self, thing: Thing) -> list[Attribute]:
        """Return attributes that no page tells about this thing: some of the conversation, or else of its kind."""
        pool = self._attributes(thing)
        labels = {attribute.label for attribute in pool}
        if labels & WHERE:  # an address nearly answers the question for the town
            labels |= WHERE
        rest = [attribute for attribute in thing.kind.attributes if attribute.label not in labels]
        return thing.unsaid if thing.unsaid and self._rng.random() < 0.7 else rest or thing.unsaid

    def _next_question(self, before: Asked, unknown: bool) -> Asked | None:
        rng, thing = self._rng, before.thing
        pages = [page for page in self._read if page.thing is thing]
        if rng.random() < 0.6 or before.attribute is LEAD:
            told = [fact[0] for page in pages for s in page.sentences for fact in s.facts if fact[0] is not before.attribute]
            choice = self._missing(thing) if unknown else told
            return self._asker.next_attribute(thing, rng.choice(choice)) if choice else None
        others = [page.thing for page in self._read if page.thing.kind is thing.kind and page.thing is not thing]
        telling = [page.thing for page in self._read if page.thing in others and page.telling(before.attribute)]
        silent = [other for other in others if other not in telling]
        choice = silent if unknown else telling
        return self._asker.next_thing(rng.choice(choice), before.attribute) if choice else None

    def _find(self, asked: Asked) -> tuple[Page | None, str]:
        """Return the page that answers, and its sentence; (None, "") if no page does."""
        for page in self._read:
            if page.thing is asked.thing and (sentence := page.telling(asked.attribute)):
                return page, sentence.text
        return None, ""

    def _things(self) -> list[Thing]:
        return list({id(page.thing): page.thing for page in self._read}.values())
