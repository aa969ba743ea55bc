"""A model's chat template, rendered so that the author of each text stays known: the template, or one of the messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..spellings import Spellings
from .dialect import Dialect, learn
from .marks import REASONING_STARTS, REASONING_TAG, Marks, Part, Piece, Unmarked
from .messages import Message, Said, begun_content, read_messages
from .sandbox import Template, TemplateError
from .variables import Tools, Variables, make_variables


class ChatTemplate:
    """A Jinja chat template as models carry it (`tokenizer.chat_template`).

    source: its text. `bos` and `eos` are the texts of those tokens, `controls` the spellings of the tokens that only a
    template may write. Raises TemplateError with the line at which the source is not Jinja.
    """

    def __init__(self, source: str, bos: str, eos: str, controls: Spellings | None = None) -> None:
        self.source = source
        self._template = Template(source)
        self._controls = controls or Spellings(())
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._dialect = learn(self._try)

    @property
    def thinks(self) -> bool:
        """Whether the model reasons before its answer, if `enable_thinking` is not false."""
        return self._dialect.thinks

    @property
    def capabilities(self) -> dict[str, bool]:
        """What the template shows, by llama-server's names."""
        dialect = self._dialect
        return {
            "supports_string_content": not dialect.parts,
            "supports_typed_content": dialect.parts or dialect.takes_lists,
            "supports_tools": self.knows("tools"),
            "supports_tool_calls": self.knows("tool_calls"),
            "supports_parallel_tool_calls": self.knows("tool_calls"),
            "supports_system_role": not dialect.merges_system,
            "supports_preserve_reasoning": self.knows("reasoning_content"),
            "supports_reasoning_effort": self.knows("reasoning_effort"),
            "supports_object_arguments": self.knows("tool_calls") and not dialect.text_arguments,
        }

    def knows(self, name: str) -> bool:
        """Whether the template reads a variable, or a field of a message, of this name: `tools`, `enable_thinking`, ..."""
        return name in self._template.names

    def pieces(
        self,
        messages: Sequence[Message],
        variables: Variables | None = None,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
    ) -> list[Piece]:
        """Render the conversation; the joined pieces are the template's output. `variables` go to the template.

        Each content, and each other string of a client that touches a special token, is rendered as a placeholder. The
        placeholder is then replaced by the form in which the template shows the real content: as it is, trimmed, without
        its reasoning, or quoted for JSON. If the template changes it in another way, the content stands as it is. Raises
        TemplateError.
        """
        said = read_messages(messages, self._dialect.takes_lists)
        # One clock for every rendering of this request.
        settings = self._variables(variables or {}, tools, self._dialect)
        settings["add_generation_prompt"] = add_generation_prompt
        real = self._render(settings, said, Unmarked())
        whole = Marks(self._controls)
        marked = self._render(settings, said, whole)
        pieces = whole.cut(marked, real)
        if pieces is None and any(REASONING_TAG.search(text) for one in said for _, text in one.texts):
            # The template looks for the tags, so this rendering keeps them.
            tagged = Marks(self._controls, keeps_tags=True)
            pieces = tagged.cut(self._render(settings, said, tagged), real)
        return whole.fill(marked) if pieces is None else pieces

    def continued(
        self,
        messages: Sequence[Message],
        variables: Variables | None = None,
        *,
        tools: Tools | None = None,
    ) -> list[Piece]:
        """Render a conversation up to the end of its last message, an answer that the model is to continue.

        The last piece is what the answer begins with: its content as it is, or its reasoning if it has no content yet.
        An answer with neither has no piece. Raises TemplateError, also for reasoning that the template does not show.
        """
        *before, last = messages
        content = begun_content(last, f"messages[{len(before)}].content")
        begun = content or str(last.get("reasoning_content") or "")
        part: Part = "content" if content or not begun else "reasoning"
        whole = [*before, {**last, "content": content}]
        try:
            pieces = self.pieces(whole, variables, tools=tools, add_generation_prompt=False)
        except TemplateError:  # some templates want a user's message last
            pieces = []
        ends = [at for at, piece in enumerate(pieces) if piece.message == len(before) and piece.part == part]
        if ends:
            *shown, end = pieces[: ends[-1] + 1]
            return [*shown, replace(end, text=_untrimmed(end.text, begun))]
        # Once the answer has begun, reasoning would come too late.
        pieces = self.pieces(before, {**(variables or {}), "enable_thinking": part == "reasoning"}, tools=tools)
        if part == "reasoning" and not _opens_reasoning(pieces):
            raise TemplateError("the chat template shows no reasoning, so there is none to continue")
        return [*pieces, Piece(begun, len(before), part=part)] if begun else pieces

    def _variables(self, given: Variables, tools: Tools | None, dialect: Dialect) -> dict[str, object]:
        return make_variables(given, tools, thinks=dialect.thinks, takes_functions=not self.knows("tools"))

    def _render(
        self, settings: Mapping[str, object], said: Sequence[Said], marks: Unmarked, dialect: Dialect | None = None
    ) -> str:
        dialect = dialect or self._dialect
        nones = {"tools": None, "documents": None} if dialect.nones else {}
        shown = dialect.show(said, marks)
        return self._template.render({**nones, **self._tokens, **marks.values(settings), "messages": shown})

    def _try(self, dialect: Dialect, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Render for learning; empty if the template refuses."""
        settings = self._variables({}, None, dialect) | {"add_generation_prompt": add_generation_prompt}
        try:
            return self._render(settings, read_messages(messages, dialect.takes_lists), Unmarked(), dialect)
        except TemplateError:
            return ""


def _opens_reasoning(pieces: Sequence[Piece]) -> bool:
    """Whether a prompt ends with the tag behind which the model reasons."""
    return bool(pieces) and pieces[-1].message is None and pieces[-1].text.rstrip().endswith(REASONING_STARTS)


def _untrimmed(shown: str, content: str) -> str:
    """Return the shown end of a content with the blanks that a template trims: what follows goes on behind them."""
    return content if shown.strip() == content.strip() else shown.rstrip() + content[len(content.rstrip()) :]
