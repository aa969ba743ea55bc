"""Values of facts: numbers, times, prices, everyday words and invented names."""

from __future__ import annotations

from random import Random

from .names import Names
from .words import Words

MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = (
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "fifteen",
    "twenty",
    "thirty",
    "forty",
    "fifty",
    "sixty",
)
NAMES = frozenset(("place", "person", "first", "river", "street", "company", "title", "event", "nature"))
OPEN = ("place", "person", "year", "number", "object", "food", "colour", "price", "product", "day", "animal", "material")


class Values:
    """Draws the value of an attribute."""

    def __init__(self, rng: Random, words: Words, names: Names) -> None:
        self._rng, self._words, self._names = rng, words, names

    def draw(self, sort: str) -> str:
        """Return a value of this sort: a name, an everyday word, or the text of one of the methods below."""
        if sort in NAMES:
            return self._names.draw(sort)
        if sort in self._words:
            return self._words.pick(self._rng, sort)
        return getattr(self, f"_{sort}")()

    def _year(self) -> str:
        return str(self._rng.randrange(1100, 2030) if self._rng.random() < 0.4 else self._rng.randrange(1850, 2027))

    def _number(self) -> str:
        rng = self._rng
        number = rng.randrange(20, 1000) if rng.random() < 0.4 else rng.randrange(1000, 90000)
        if number > 999 and rng.random() < 0.5:
            number -= number % 100
        return f"{number:,}" if rng.random() < 0.6 else str(number)

    def _count(self) -> str:
        rng = self._rng
        return rng.choice(NUMBERS) if rng.random() < 0.3 else str(rng.randrange(2, 400 if rng.random() < 0.5 else 30))

    def _clock(self) -> str:
        rng = self._rng
        way = rng.random()
        hour, minute = rng.randrange(0, 24), rng.choice((0, 5, 10, 15, 20, 25, 30, 40, 45, 50, rng.randrange(60)))
        if way < 0.5:
            return f"{hour}:{minute:02}"
        if way < 0.7:
            return f"{hour % 12 or 12}:{minute:02} {'am' if hour < 12 else 'pm'}"
        if way < 0.85:
            return rng.choice(("half past ", "quarter past ", "ten past ", "quarter to ")) + rng.choice(NUMBERS[:11])
        return rng.choice(("noon", "midnight", *NUMBERS[:11], "eight o'clock", "nine in the morning", "ten at night"))

    _time = _clock

    def _price(self) -> str:
        rng = self._rng
        way = rng.random()
        coin = rng.choice(("euros", "crowns", "pounds", "dollars", "francs", "marks", "florins"))
        if way < 0.4:
            return f"{rng.randrange(2, 400)} {coin}"
        if way < 0.6:
            return f"{rng.choice(NUMBERS)} {coin}"
        if way < 0.8:
            return f"{rng.choice('€$£')}{rng.randrange(1, 90)}.{rng.randrange(100):02}"
        return f"{rng.randrange(1, 60)}.{rng.choice(('50', '20', '80', '90'))} {coin}"

    def _date(self) -> str:
        rng = self._rng
        day, month = rng.randrange(1, 29), rng.choice(MONTHS)
        way = rng.random()
        if way < 0.5:
            return f"{day} {month}"
        if way < 0.7:
            return f"{month} {day}"
        return f"the {rng.choice(('first', 'second', 'third', 'last'))} {rng.choice(DAYS)} in {month}"

    def _day(self) -> str:
        return self._rng.choice(DAYS)

    def _span(self, unit: str, most: int) -> str:
        rng = self._rng
        number = rng.choice(NUMBERS[:12]) if rng.random() < 0.5 else str(rng.randrange(2, most))
        return f"{number} {unit}"

    def _days(self) -> str:
        return self._span(self._rng.choice(("days", "days", "weeks", "nights", "hours")), 30)

    def _years(self) -> str:
        return self._span("years", 40)

    def _duration(self) -> str:
        rng = self._rng
        if rng.random() < 0.2:
            return rng.choice(("an hour", "half an hour", "one hour and a half", "a whole day", "three quarters of an hour"))
        return self._span(rng.choice(("minutes", "minutes", "hours", "hours", "days")), 90)

    def _interval(self) -> str:
        rng = self._rng
        way = rng.random()
        if way < 0.4:
            return f"every {rng.choice((*NUMBERS, '5', '10', '20', '30', '45'))} minutes"
        if way < 0.6:
            return f"{rng.choice(NUMBERS[:8])} times a {rng.choice(('day', 'week', 'year', 'month'))}"
        return rng.choice(("every hour", "twice a day", "once a week", "every second day", f"only on {rng.choice(DAYS)}s"))

    def _hours(self) -> str:
        rng = self._rng
        text = f"from {self._clock()} to {self._clock()}"
        if rng.random() < 0.3:
            text += f" on {rng.choice(DAYS)}s" if rng.random() < 0.5 else f" from {rng.choice(DAYS)} to {rng.choice(DAYS)}"
        return text

    def _metres(self) -> str:
        most = 2500 if self._rng.random() < 0.5 else 90
        return f"{self._rng.randrange(2, most)} {self._rng.choice(('metres', 'metres', 'feet', 'm'))}"

    def _km(self) -> str:
        return f"{self._rng.randrange(2, 400)} {self._rng.choice(('kilometres', 'kilometres', 'km', 'miles'))}"

    def _kg(self) -> str:
        return f"{self._rng.randrange(2, 900)} {self._rng.choice(('kilograms', 'grams', 'kg', 'pounds', 'tonnes'))}"

    def _watts(self) -> str:
        return f"{self._rng.randrange(2, 3000)} {self._rng.choice(('watts', 'volts', 'kilowatts'))}"

    def _speed(self) -> str:
        return f"{self._rng.randrange(5, 300)} {self._rng.choice(('kilometres an hour', 'km/h', 'knots', 'miles an hour'))}"

    def _millions(self) -> str:
        coin = self._rng.choice(("euros", "crowns", "dollars", "francs"))
        return f"{self._rng.randrange(2, 900)} {self._rng.choice(('million', 'thousand'))} {coin}"

    def _phone(self) -> str:
        rng = self._rng
        return (
            f"{rng.randrange(100, 1000)} {rng.randrange(1000, 10000)}"
            if rng.random() < 0.6
            else f"0{rng.randrange(10000, 999999)}"
        )

    def _code(self) -> str:
        rng = self._rng
        letters = "".join(rng.choice("ABCDEFGHKLMNPRSTXZ") for _ in range(rng.choice((1, 2, 3))))
        return f"{letters}{rng.choice(('', '-', ' '))}{rng.randrange(10, 9999)}"
