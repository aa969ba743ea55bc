"""Invented names: new ones for every sample, so that only copying from the prompt can answer."""

from __future__ import annotations

from random import Random

from .words import Words

# The sounds of invented languages: onsets, vowels and codas of their syllables.
_STYLES = (
    ("b br c d dr f g gl h k l m n p r s st t tr v w", "a e i o u", "l n r s th m nd rk"),
    ("b d f g k l m n p r s t v z", "a e i o u ia io", "n r s l"),
    ("bj d fj g gr h hv k l m n r s sk sn st t v", "a e i o y ei au", "ld rn sk ll nd g k m"),
    ("ch d f j k m n p q r s sh t y z", "a e i o u ai ou", "n ng m k"),
    ("c cl d f gw h l ll m n p r rh t tr", "a e i o w y", "n th dd r l s ch"),
)
_SOUNDS = tuple(tuple(sounds.split() for sounds in style) for style in _STYLES)
_BEFORE = ("Upper", "Lower", "Port", "New", "Old", "Little", "Great", "Fort", "Mount", "San")
_AFTER = ("Bay", "Hill", "Mill", "Harbour", "Heath", "Cross", "Springs", "Green")
_ENDS = ("", "", "", "a", "o", "en", "is", "or", "in", "el", "us", "ia", "ar", "ov", "ek", "ath", "ora", "ino", "ette", "sk")


class Names:
    """Draws names of every sort. Never draws a name with a word in `reserved` (lower case)."""

    def __init__(self, rng: Random, words: Words, reserved: frozenset[str] = frozenset()) -> None:
        self._rng, self._words, self._reserved = rng, words, reserved

    def draw(self, sort: str, noun: str = "") -> str:
        """Return a name of this sort (`place`, `person`, `line`, ...) for a thing with this noun."""
        while True:
            name = getattr(self, f"_{sort}")(noun)
            if self._reserved.isdisjoint(name.lower().replace("-", " ").split()):
                return name

    def similar(self, name: str) -> str:
        """Return a name that is easily mistaken for `name`: one of its words has a letter changed."""
        rng, parts = self._rng, name.split()
        at = rng.randrange(len(parts))
        word = parts[at]
        if len(word) < 4 or not word.isalpha():
            return f"{name} {rng.choice(('II', 'B', 'North', 'New', '2'))}"
        place = rng.randrange(1, len(word) - 1)
        vowels = "aeiou"
        other = rng.choice([c for c in (vowels if word[place] in vowels else "lnrstmdk") if c != word[place]])
        parts[at] = word[:place] + other + word[place + 1 :]
        return " ".join(parts)

    def _word(self, noun: str = "") -> str:
        """An invented word of two or three syllables, capitalised."""
        rng = self._rng
        if rng.random() < 0.2:
            return self._blend()
        onsets, vowels, codas = rng.choice(_SOUNDS)
        syllables = [
            rng.choice(onsets) + rng.choice(vowels) + (rng.choice(codas) if rng.random() < 0.4 else "")
            for _ in range(rng.choice((1, 2, 2, 2, 3)))
        ]
        word = "".join(syllables) + rng.choice(_ENDS)
        return word.capitalize() if len(word) > 3 else (word + rng.choice(onsets) + rng.choice(vowels)).capitalize()

    def _blend(self) -> str:
        """Join the first half of one everyday word and the second half of another, for tokens that syllables lack."""
        sorts = ("common", "common", "noun", "adjective", "first", "last", "front")
        left, right = (self._words.pick(self._rng, self._rng.choice(sorts)).split()[0].lower() for _ in range(2))
        return (left[: (len(left) + 1) // 2] + right[len(right) // 2 :]).capitalize()

    def unknown_word(self) -> str:
        """Return a word that no list has, in small letters: a reader can only copy it."""
        return (self._blend() if self._rng.random() < 0.6 else self._word()).lower()

    def _place(self, noun: str = "") -> str:
        rng = self._rng
        way = rng.random()
        if way < 0.62:
            return self._word()
        if way < 0.85:
            return self._words.pick(rng, "front") + self._words.pick(rng, "back")
        if way < 0.93:
            return f"{rng.choice(_BEFORE)} {self._word()}"
        return f"{self._word()} {rng.choice(_AFTER)}"

    def _first(self, noun: str = "") -> str:
        return self._words.pick(self._rng, "first") if self._rng.random() < 0.55 else self._word()

    def _last(self) -> str:
        way = self._rng.random()
        if way < 0.25:
            return self._words.pick(self._rng, "last")
        return self._word() if way < 0.85 else self._place()

    def _person(self, noun: str = "") -> str:
        title = self._rng.choice(("Dr. ", "Mrs. ", "Mr. ", "Professor ")) if self._rng.random() < 0.08 else ""
        return f"{title}{self._first()} {self._last()}"

    def _pet(self, noun: str = "") -> str:
        way = self._rng.random()
        return self._word() if way < 0.6 else self._first() if way < 0.8 else self._adjective().capitalize()

    def _adjective(self) -> str:
        return self._words.pick(self._rng, self._rng.choice(("adjective", "colour"))).split()[0]

    def _thing(self) -> str:
        """Return two everyday words, for example `Silver Heron`."""
        words, rng = self._words, self._rng
        left = words.pick(rng, "front") if rng.random() < 0.5 else self._adjective().capitalize()
        return f"{left} {words.pick(rng, rng.choice(('animal', 'noun', 'instrument', 'plant'))).title()}"

    def _named(self, noun: str) -> str:
        """`Halden ferry`, `Silver Heron Ferry`, `Heron Ferry`."""
        rng = self._rng
        if rng.random() < 0.6:
            head = self._word() if rng.random() < 0.7 else self._place()
        else:
            head = self._thing() if rng.random() < 0.5 else self._words.pick(rng, "noun").title()
        return f"{head} {noun.title() if rng.random() < 0.65 else noun}"

    def _line(self, noun: str = "") -> str:
        noun = noun or "train"
        way = self._rng.random()
        if way < 0.75:
            return self._named(noun)
        if way < 0.9:
            return f"{noun} {self._words.pick(self._rng, 'front')} {self._rng.randrange(1, 99)}"
        return self._thing()

    def _event(self, noun: str = "") -> str:
        noun = noun or "festival"
        return (
            self._named(noun)
            if self._rng.random() < 0.85
            else f"{noun.title()} of {self._words.pick(self._rng, 'noun').title()}s"
        )

    def _house(self, noun: str = "") -> str:
        noun = noun or "museum"
        rng = self._rng
        way = rng.random()
        if way < 0.65:
            return self._named(noun)
        if way < 0.8:
            return f"{noun.title()} of {self._words.pick(rng, 'noun').title()}s"
        return self._thing()

    def _nature(self, noun: str = "") -> str:
        noun = noun or self._rng.choice(("lake", "sea", "bay", "river"))
        return self._word() if self._rng.random() < 0.4 else self._named(noun)

    def _river(self, noun: str = "") -> str:
        return self._word()

    def _model(self, noun: str = "") -> str:
        noun = noun or "machine"
        rng = self._rng
        way = rng.random()
        number = rng.choice((rng.randrange(2, 10), 10 * rng.randrange(1, 100), rng.randrange(1000, 10000)))
        if way < 0.4:
            return f"{self._word()} {number}"
        return self._named(noun) if way < 0.8 else f"{self._word()} {rng.choice('ABCDXYZ')}{number}"

    def _company(self, noun: str = "") -> str:
        rng = self._rng
        ends = ("Works", "Brothers", "Company", "Group", "Society", "United", "Ltd", "Foundation", "Press", "Labs", "Line")
        way = rng.random()
        if way < 0.35:
            return self._word()
        return f"{self._word()} {rng.choice(ends)}" if way < 0.7 else f"{self._thing()}s"

    def _title(self, noun: str = "") -> str:
        rng, words = self._rng, self._words
        way = rng.random()
        if way < 0.35:
            return f"The {self._thing()}"
        if way < 0.6:
            return f"The {words.pick(rng, 'noun').title()} of {self._word()}"
        return (
            f"{self._word()} {words.pick(rng, 'noun').title()}"
            if way < 0.8
            else f"The {self._word()} {rng.choice(('Post', 'Times', 'Song', 'Letter'))}"
        )

    def _project(self, noun: str = "") -> str:
        noun = noun or "project"
        return self._named(noun)

    def _street(self, noun: str = "") -> str:
        rng = self._rng
        head = self._words.pick(rng, "noun").capitalize() if rng.random() < 0.5 else self._word()
        return f"{rng.randrange(1, 90)} {head} {rng.choice(('Street', 'Road', 'Lane', 'Square', 'Alley', 'Quay'))}"
