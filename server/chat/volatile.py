"""Instructions that change with each request: the prompt keeps the old text, and states the change at its end.

If a date or a counter at the start of a prompt changes, all cached KV after it is useless. To keep the KV, all prompts of
a lineage have the instructions of the lineage's first request. A lineage consists of the requests of one session with the
same tools. A line at the end of the last message states how the current instructions differ. A line about changes stays at
the end of its message in later prompts, because each prompt continues the KV of the previous prompt.

Changes of reminders are stated in the same way as changes of instructions. A reminder is a tagged block at the end of a
user's message, which the client changes or leaves out when it sends the message again. Text other than instructions and
reminders is neither compared nor changed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from hashlib import blake2b
from sys import getsizeof
from threading import Lock

import msgspec
from msgspec import Struct

from ...models.template_messages import Message, content_texts
from .chat_files import ChatFiles, DamagedFile, checked_content, with_checksum

INSTRUCTIONS = ("system", "developer")  # the roles of messages at the start of a conversation
UNIT = re.compile(r"(?<=\n)|(?<=[.!?;] )")  # where a text is split into units: after lines and sentences
MOST_PIECES, LONGEST = 8, 1000  # most changed pieces of one request's instructions; most characters of a piece
LEAST_SAME = 0.8  # least share of equal text; texts with less in common are different instructions
MOST_UNITS = 200  # most units between the first and the last difference; comparing takes quadratic time
MOST_FRONTS, MOST_LINES = 8, 1024  # most remembered fronts of a lineage; most lines of a front
OVERHEAD = 512  # bytes of a line without its texts: its key, its objects, the name of its file
MOST_IN_FILES = 256 << 20  # most bytes of all files: 8 times the bound in memory, since files have names and checksums
MAGIC, SUFFIX = b"slotcache instructions 1\n", ".instructions"
TAG = re.compile(r"</([A-Za-z][\w-]{0,63})>\s*\Z")
LONGEST_TAG = 80  # most characters of an end tag and the space after it
AT_END, OWN_PART = b"at the end", b"own part"  # the place of blocks in a message
QUOTED = 80  # most characters of the old text that a line quotes
TARGETS = ("user", "tool", "function")

Lineage = tuple[str, ...]
"""The requests that may share instructions, as a scope, a session's name, and a digest of the tools. Other requests may be
another client's, whose text a prompt must not get.
"""
Texts = tuple[tuple[str, ...], ...]
"""For each message with instructions, the texts of its parts."""
Place = tuple[int, int, int]
"""The place of a piece in the first request: the indexes of the message, of its part, and of the first character."""


@dataclass(frozen=True, slots=True)
class ChangedText:
    """A changed piece of the instructions. before: the text in the prompt. after: the text in this request."""

    before: str
    after: str

    def line(self, is_known: bool, where: str = "In the instructions") -> str:
        """Return the line that states the change. is_known: whether an earlier line already states a change of the piece."""
        before, after = " ".join(self.before.split())[:QUOTED], self.after.strip()
        if not after:
            return f'[{where}, "{before}" does not hold any more.]'
        if is_known or not before:
            return f"[Now: {after}]"
        return f'{after} [In the instructions, in place of "{before}"]'


Changes = Mapping[Place, ChangedText]


@dataclass(slots=True, eq=False)
class Front:
    """The instructions in the first request of a lineage, or in a later request if they are not similar to earlier ones.

    lines: the texts at the ends of messages, each by a digest of all messages up to its message. Such a text is a line
        that states changes, or the blocks of a user's message.
    id: an id from which the names of the front's files are made. Fronts with the same lineage and texts have the same
        id.
    num_bytes: the approximate size in memory.
    """

    lineage: Lineage
    texts: Texts
    lines: OrderedDict[bytes, tuple[str, Changes]] = field(default_factory=OrderedDict)
    num_bytes: int = 0
    id: bytes = b""

    def __post_init__(self) -> None:
        self.id = blake2b(msgspec.msgpack.encode((self.lineage, self.texts)), digest_size=16).digest()
        self.num_bytes = OVERHEAD + sum(getsizeof(text) for parts in self.texts for text in parts)

    def put(self, key: bytes, line: str, changes: Changes) -> list[bytes]:
        """Remember a line. An empty line removes the line that the key has. Return the keys of all removed lines.

        If there are too many lines, the oldest line is removed, too.
        """
        old = self.lines.pop(key, None)
        self.num_bytes -= _size(old) if old else 0
        if line:
            self.lines[key] = line, changes
            self.num_bytes += _size(self.lines[key])
        gone = [key] if old and not line else []
        if len(self.lines) > MOST_LINES:
            oldest, said = self.lines.popitem(last=False)
            self.num_bytes -= _size(said)
            gone.append(oldest)
        return gone


def _size(said: tuple[str, Changes]) -> int:
    """Return the bytes of a line and its changed pieces."""
    line, changes = said
    pieces = sum(OVERHEAD + getsizeof(change.before) + getsizeof(change.after) for change in changes.values())
    return OVERHEAD + getsizeof(line) + pieces


@dataclass(slots=True)
class _Reminders:
    """The tagged blocks at the end of users' messages in one request.

    start: the index of the first message after the instructions.
    keys: for each message from `start` on, a digest of all messages from `start` to this message, without their blocks.
    changes: the blocks that have changed or are missing, except those in `replaced`.
    replaced: the missing blocks for which a later message has a block with the same tag at its end.
    """

    start: int
    keys: list[bytes] = field(default_factory=list)
    changes: dict[Place, ChangedText] = field(default_factory=dict)
    replaced: dict[Place, ChangedText] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Instructions:
    """The instructions of a lineage's requests, and the lines at the ends of their messages.

    lock: locked while a request uses the instructions.
    changed: by the name of a file, the content that the store has to write; None: the store has to delete the file.
    files: the names of all files. Only the store sets `files`, `num_bytes` and `is_forgotten`.
    num_bytes: the bytes of memory that the store has counted.
    is_forgotten: whether the store has dropped these instructions.
    """

    lineage: Lineage
    fronts: list[Front] = field(default_factory=list)  # the least recently used first
    lock: Lock = field(default_factory=Lock)
    changed: dict[str, StoredInstructions | None] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    num_bytes: int = 0
    is_forgotten: bool = False

    def settle(self, messages: Sequence[Message]) -> tuple[list[Message], tuple[ChangedText, ...]]:
        """Return the messages for the prompt, and the changes of this request.

        The messages have the instructions of the first request, and lines that state changes.

        Raises TemplateError if the content of a message is not text.
        """
        number = next((at for at, message in enumerate(messages) if message["role"] not in INSTRUCTIONS), len(messages))
        last = next((at for at in range(len(messages) - 1, number - 1, -1) if messages[at]["role"] in TARGETS), None)
        if not number or last is None:
            return list(messages), ()
        texts = tuple(
            tuple(content_texts(message.get("content"), f"messages[{at}].content"))
            for at, message in enumerate(messages[:number])
        )
        front, changes = self._front(texts)
        shown = [*map(_with_texts, messages[:number], front.texts), *messages[number:]]
        reminders = self._keep_reminders(front, shown, range(number, last + 1))
        self._say(front, shown, {**changes, **reminders.changes}, reminders)
        kept = [*reminders.replaced.values(), *reminders.changes.values()]
        return shown, (*changes.values(), *kept[-MOST_PIECES:])

    def _front(self, texts: Texts) -> tuple[Front, Changes]:
        """Return the remembered instructions that differ least from a request's instructions, and the changes between them.

        If no remembered instructions are similar, remember the request's own, and return them without changes.
        """
        found = [(changes, front) for front in self.fronts if (changes := _changes(front.texts, texts)) is not None]
        changes, front = min(found, key=lambda pair: len(pair[0]), default=({}, None))
        if front is not None:
            self.fronts.remove(front)
        else:
            front = Front(self.lineage, texts)
            self.changed[_name(front.id, b"")] = StoredInstructions(self.lineage, front.id, texts)
        self.fronts.append(front)
        for gone in self.fronts[:-MOST_FRONTS]:
            self.changed |= dict.fromkeys(_name(gone.id, key) for key in (b"", *gone.lines))
        del self.fronts[:-MOST_FRONTS]
        return front, changes

    def _keep_reminders(self, front: Front, shown: list[Message], messages: range) -> _Reminders:
        """Give each user's message the blocks that it had when the client first sent it.

        Return the blocks that the client sends differently now.
        """
        found, digest = _Reminders(messages.start), blake2b(digest_size=16)
        parted = [_parted(shown[at]) if shown[at]["role"] == "user" else None for at in messages]
        later = {tag: at for at, parts in zip(messages, parted, strict=True) if parts and (tag := _tag(parts[1]))}
        for at, parts in zip(messages, parted, strict=True):
            body, block, where = parts or (shown[at], "", AT_END)
            digest.update(msgspec.json.encode(body))
            found.keys.append(key := digest.digest())
            where = next((one for one in (AT_END, OWN_PART) if key + one in front.lines), where)
            first = front.lines[key + where][0] if key + where in front.lines else block
            if first:
                self._put(front, key + where, (first, {}))
            if first != block:
                shown[at] = _with_block(body, first, where)
                is_replaced = not block and later.get(_tag(first), -1) > at
                (found.replaced if is_replaced else found.changes)[at, 0, 0] = ChangedText(first, block)
        return found

    def _say(self, front: Front, shown: list[Message], changes: Changes, reminders: _Reminders) -> None:
        """Add to each message its line from earlier prompts, and to the last message a line about new changes."""
        said: Changes = {}
        for at, key in enumerate(reminders.keys, reminders.start):
            if key is reminders.keys[-1]:
                self._put(front, key, ("\n".join(_news(said, changes, reminders)), changes))
            if known := front.lines.get(key):
                front.lines.move_to_end(key)
                line, said = known
                shown[at] = _with_line(shown[at], line)

    def _put(self, front: Front, key: bytes, said: tuple[str, Changes]) -> None:
        """Remember the text at the end of a message.

        If this text is new, add it to `changed`, so that the store writes it.
        """
        is_new = said != front.lines.get(key, ("", said[1]))
        gone = front.put(key, *said)
        self.changed |= dict.fromkeys(_name(front.id, one) for one in gone)
        if is_new and said[0]:
            pieces = [(place, (change.before, change.after)) for place, change in said[1].items()]
            stored = StoredInstructions(self.lineage, front.id, key=key, line=said[0], changes=pieces)
            self.changed[_name(front.id, key)] = stored


def _changes(old: Texts, new: Texts) -> Changes | None:
    """Return the pieces that have changed; None: the texts differ too much to be the same instructions."""
    if [*map(len, old)] != [*map(len, new)]:
        return None
    pairs = [
        (message, part, before, after)
        for message, (befores, afters) in enumerate(zip(old, new, strict=True))
        for part, (before, after) in enumerate(zip(befores, afters, strict=True))
    ]
    changes: dict[Place, ChangedText] = {}
    for message, part, before, after in pairs:
        for place, change in _compared(before, after):
            if len(changes) == MOST_PIECES or max(len(change.before), len(change.after)) > LONGEST:
                return None
            changes[message, part, place] = change
    changed = sum(len(change.before) + len(change.after) for change in changes.values())
    if changed > (1 - LEAST_SAME) * sum(len(before) + len(after) for _, _, before, after in pairs):
        return None
    return changes


def _news(said: Changes, changes: Changes, reminders: _Reminders) -> Iterator[str]:
    """Yield a line for each piece whose change is not stated yet, and for each changed piece whose first text is back.

    said: the changes that earlier lines state. changes: the changes of this request.
    """

    def line(place: Place, change: ChangedText, is_known: bool) -> str:
        is_block = place[0] >= reminders.start
        return change.line(is_known or is_block, "In a message" if is_block else "In the instructions")

    for place, change in changes.items():
        if said.get(place) != change:
            yield line(place, change, place in said)
    for place, change in said.items():
        if place not in reminders.replaced and not any(_overlap(place, change, *other) for other in changes.items()):
            yield line(place, ChangedText(change.after, change.before), False)


def _overlap(place: Place, change: ChangedText, other: Place, other_change: ChangedText) -> bool:
    """Return whether two pieces overlap in the text of the first request."""
    if place[:2] != other[:2]:
        return False
    return place == other or max(place[2], other[2]) < min(
        place[2] + len(change.before), other[2] + len(other_change.before)
    )


def _compared(before: str, after: str) -> Iterator[tuple[int, ChangedText]]:
    """Yield the pieces in which two texts differ, each with its position in `before`."""
    if before == after:
        return
    old, new = UNIT.split(before), UNIT.split(after)
    first = next(
        (at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), min(len(old), len(new))
    )
    most = min(len(old), len(new)) - first
    same_after = next((at for at in range(most) if old[-1 - at] != new[-1 - at]), most)
    old_middle, new_middle = old[first : len(old) - same_after], new[first : len(new) - same_after]
    if max(len(old_middle), len(new_middle)) > MOST_UNITS:
        yield 0, ChangedText(before, after)
        return
    for kind, i, i_stop, j, j_stop in SequenceMatcher(None, old_middle, new_middle, autojunk=False).get_opcodes():
        if kind != "equal":
            place = sum(map(len, old[: first + i]))
            yield place, ChangedText("".join(old_middle[i:i_stop]), "".join(new_middle[j:j_stop]))


def _with_texts(message: Message, texts: Sequence[str]) -> Message:
    """Return a message with these texts in place of the texts of its parts."""
    if isinstance(message.get("content"), list):
        return {**message, "content": [{"type": "text", "text": text} for text in texts]}
    return {**message, "content": texts[0]} if texts else message


def _parted(message: Message) -> tuple[Message, str, bytes]:
    """Return a message without the tagged blocks at its end, then these blocks, and where in the message they were."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    last = parts[-1] if parts else None
    text = last.get("text") if isinstance(last, Mapping) and last.get("type") == "text" else None
    if not isinstance(text, str) or (begin := _blocks_begin(text)) == len(text):
        return message, "", AT_END
    if not isinstance(content, list):
        return {**message, "content": text[:begin]}, text[begin:], AT_END
    if begin == 0:
        return {**message, "content": content[:-1]}, text, OWN_PART
    return {**message, "content": [*content[:-1], {**parts[-1], "text": text[:begin]}]}, text[begin:], AT_END


def _blocks_begin(text: str) -> int:
    """Return the position where the tagged blocks at the end of a text begin; the text's length if there are no blocks."""
    begin = len(text)
    while end := TAG.search(text, max(begin - LONGEST_TAG, 0), begin):
        least = max(len(text) - LONGEST, 0)
        start = max(text.rfind(f"<{end[1]}{sign}", least, end.start()) for sign in "> ")
        if start < 0:
            break
        begin = start
    return begin if begin == len(text) else len(text[:begin].rstrip())


def _tag(blocks: str) -> str:
    """Return the tag of the last of these blocks; empty: there are no blocks."""
    return found[1] if (found := TAG.search(blocks)) else ""


def _with_block(message: Message, block: str, where: bytes) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": f"{content}{block}"}
    if where == OWN_PART:
        return {**message, "content": [*content, {"type": "text", "text": block}]}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + block}]}


def _with_line(message: Message, line: str) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": line}]}
    return {**message, "content": f"{content}\n\n{line}" if content else line}


# ---- Files ---------------------------------------------------------------------------------------------------------------
# The instructions of a lineage's first request have a file, and each line has a file. The store writes the files.


class StoredInstructions(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file: either the texts of a `Front`, or one line of a `Front`.

    key: the line's key; empty: the file contains the texts.
    """

    lineage: Lineage
    front: bytes
    texts: Texts = ()
    key: bytes = b""
    line: str = ""
    changes: list[tuple[Place, tuple[str, str]]] = []  # msgspec copies the default


STORED = msgspec.msgpack.Decoder(StoredInstructions)


def encode(stored: StoredInstructions) -> list[bytes]:
    """Return the parts of a file with this content."""
    return with_checksum(MAGIC, msgspec.msgpack.encode(stored))


def decode(data: bytes) -> StoredInstructions:
    """Return the content of a file. Raises DamagedFile."""
    try:
        return STORED.decode(checked_content(MAGIC, data))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedFile(f"it is not as expected: {error}") from None


def restore(files: ChatFiles) -> Iterable[Instructions]:
    """Return the instructions in the files, in the order of their last changes.

    Delete the file of a line if its front is in no file.
    """
    loaded = files.load(SUFFIX, MOST_IN_FILES, decode, lambda stored: _name(stored.front, stored.key))
    oldest_first = [stored for stored, _ in reversed(loaded)]
    fronts = {stored.front: Front(stored.lineage, stored.texts) for stored in oldest_first if not stored.key}
    found: OrderedDict[Lineage, Instructions] = OrderedDict()
    for stored in oldest_first:
        front, name = fronts.get(stored.front), _name(stored.front, stored.key)
        if front is None or front.id != stored.front:
            files.drop([name])
            continue
        instructions = found.setdefault(front.lineage, Instructions(front.lineage))
        found.move_to_end(front.lineage)
        instructions.files.add(name)
        if stored.key:
            front.put(stored.key, stored.line, {place: ChangedText(*texts) for place, texts in stored.changes})
        else:
            instructions.fronts.append(front)
    for instructions in found.values():
        instructions.num_bytes = sum(front.num_bytes for front in instructions.fronts)
    return found.values()


def _name(front: bytes, key: bytes) -> str:
    """Return the name of the file for a front (with an empty key) or for one of its lines.

    The name is a hash, so it reveals nothing.
    """
    return blake2b(front + key, digest_size=16).hexdigest() + SUFFIX
