"""The chat template of a model: how it renders messages, and which features it has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256

from .call_arguments import argument_object, argument_text
from .jinja import Template, TemplateError
from .marks import REASONING_STARTS, REASONING_TAG, Marks, Part, TextPiece, Unmarked
from .shapes import learn_shapes
from .template_messages import Message, Run, TemplateMessage, prefilled_content, read_messages
from .tokenizer import Spellings

# ---- The messages that a chat template expects. Templates differ, and rendering shows how. ------------------------------

Shown = dict[str, object]
Render = Callable[["TemplateFeatures", Sequence[Message], bool], str]
"""Renders messages with some features, with or without a generation prompt. Returns "" if the template refuses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFeatures:
    """What a template expects of messages and variables.

    parts: each content must be a list of parts, even if it is only text.
    takes_lists: a content may be a list.
    text_arguments: a tool call's arguments must be JSON text, as in the API. If `text_arguments` is false, the arguments are
    an object, as in the training of models.
    nones: without tools or documents, `tools` and `documents` must be None instead of undefined.
    thinking_part: reasoning must be a part of the content, of type thinking.
    thinks_or_says: a message with calls must not have both reasoning and content.
    tool_responses: the results of tools must be in the message with the calls.
    thinks: the model reasons unless reasoning is switched off.
    """

    parts: bool = False
    takes_lists: bool = False
    text_arguments: bool = False
    nones: bool = True
    thinking_part: bool = False
    thinks_or_says: bool = False
    tool_responses: bool = False
    thinks: bool = False

    def show(self, said: Sequence[TemplateMessage], marks: Unmarked) -> list[Shown]:
        """Return the messages in the form that the template expects, with placeholders for the client's texts."""
        shown = [self._message(one, marks) for one in said]
        return _with_tool_responses(shown) if self.tool_responses else shown

    def _message(self, said: TemplateMessage, marks: Unmarked) -> Shown:
        fields: Shown = {**said.fields, "role": said.role}
        calls = fields.get("tool_calls")
        if isinstance(calls, list):
            read = argument_text if self.text_arguments else argument_object
            fields["tool_calls"] = [_with_arguments(call, read) for call in calls]
        shown = marks.values(fields) | {"content": self._content(said, marks)}
        if not said.reasoning:
            return shown
        reasoning = marks.reasoning(said.reasoning, said.at)
        if self.thinking_part:
            content = shown["content"]
            texts = content if isinstance(content, list) else _text_parts([content])
            return shown | {"content": [{"type": "thinking", "thinking": reasoning}, *texts]}
        if self.thinks_or_says and calls:
            del shown["content"]
        return shown | {"reasoning_content": reasoning, "thinking": reasoning}

    def _content(self, said: TemplateMessage, marks: Unmarked) -> object:
        texts = [_joined(run, said.role == "assistant", marks) for run in said.runs]
        if said.is_list:
            return _text_parts(texts)
        content = "".join(texts)
        return _text_parts([content]) if self.parts and content else content


def _joined(run: Run, is_answer: bool, marks: Unmarked) -> str:
    if len(run) == 1 and (at := run[0][0]) is not None:
        return marks.content(run[0][1], at, is_answer)
    return "".join(text if at is None else marks.content(text, at, is_answer) for at, text in run)


def _text_parts(texts: Sequence[object]) -> list[Shown]:
    return [{"type": "text", "text": text} for text in texts]


# ---- learning ----------------------------------------------------------------------------------------------------------

_QUESTION: Message = {"role": "user", "content": "question"}
_ID = "trial0000"  # some templates require nine letters or digits


def learn(render: Render) -> TemplateFeatures:
    """Find a template's features in steps.

    Each step renders trials with several values of a feature, and keeps a value that works.
    """
    features = _learn_contents(render)
    for step in (_learn_lists, _learn_arguments, _learn_reasoning, _learn_results, _learn_thinking):
        features = step(features, render)
    return features


def _learn_contents(render: Render) -> TemplateFeatures:
    """Try the forms of a user's content in turn. Return the features for the first form whose text the template shows."""
    candidates = [TemplateFeatures(parts=parts, nones=nones) for parts in (False, True) for nones in (True, False)]
    message = {"role": "user", "content": "needle"}
    return next((features for features in candidates if "needle" in render(features, [message], False)), TemplateFeatures())


def _learn_lists(features: TemplateFeatures, render: Render) -> TemplateFeatures:
    lists = replace(features, takes_lists=True)
    shown = render(lists, [{"role": "user", "content": _text_parts(["first", "second"])}], False)
    return lists if "first" in shown and "second" in shown and not _prints(shown, "text") else features


def _learn_arguments(features: TemplateFeatures, render: Render) -> TemplateFeatures:
    """Learn whether a tool call's arguments must be text. Some templates omit an object, or print it as Python does."""

    as_object, as_text = (
        render(replace(features, text_arguments=is_text), [_call({"needle": 1})], False) for is_text in (False, True)
    )
    # No model was trained on a dict as Python prints it.
    fits = "needle" in as_object and "{'needle'" not in as_object
    return replace(features, text_arguments=not fits and "needle" in as_text)


def _learn_reasoning(features: TemplateFeatures, render: Render) -> TemplateFeatures:
    answer = {"role": "assistant", "content": "answer", "reasoning_content": "needle"}
    by_parts = replace(features, thinking_part=True)
    shown, shown_by_parts = (render(one, [_QUESTION, answer], False) for one in (features, by_parts))
    if "needle" not in shown and "needle" in shown_by_parts and not _prints(shown_by_parts, "thinking"):
        return by_parts
    call = [_QUESTION, {**_call("{}"), **answer}]
    one = replace(features, thinks_or_says=True)
    return one if not render(features, call, False) and render(one, call, False) else features


def _learn_results(features: TemplateFeatures, render: Render) -> TemplateFeatures:
    """Learn whether a tool's result must be in the message with the call.

    The result must be there if moving it changes the text that the template writes before it.
    """
    messages = [_QUESTION, _call("{}"), {"role": "tool", "tool_call_id": _ID, "content": "needle"}]
    joined = replace(features, tool_responses=True)
    as_joined, as_message = (render(one, messages, False).partition("needle") for one in (joined, features))
    return joined if as_joined[1] and as_joined[0][-12:] != as_message[0][-12:] else features


def _learn_thinking(features: TemplateFeatures, render: Render) -> TemplateFeatures:
    """Learn whether the model reasons.

    A model reasons if its template shows reasoning, or if a prompt ends differently with reasoning switched on.
    """
    answer = {"role": "assistant", "content": "answer", "reasoning_content": "needle"}
    shows = "needle" in render(features, [_QUESTION, answer], False)
    thinking = replace(features, thinks=True)
    ends = [render(one, [_QUESTION], True).rpartition("question")[2] for one in (features, thinking)]
    return thinking if shows or ends[0] != ends[1] else features


def _prints(shown: str, name: str) -> bool:
    """Return whether a template printed a whole value with its field names, because it does not know such values."""
    return f"'{name}'" in shown or f'"{name}"' in shown


def _call(arguments: object) -> Message:
    function = {"name": "trial", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": _ID, "type": "function", "function": function}]}


# ---- parts of messages -------------------------------------------------------------------------------------------------


def _with_arguments(call: object, read: Callable[[object], object]) -> object:
    """Return a tool call with its arguments converted by `read`."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": read(function.get("arguments"))}}


def _with_tool_responses(shown: Sequence[Shown]) -> list[Shown]:
    """Move results of tools into the message with the calls.

    If an answer follows the results, move the answer's content into this message, too.
    """
    joined: list[Shown] = []
    names: dict[str, object] = {}
    responses: list[Shown] = []
    is_called = False
    for message in shown:
        calls = message.get("tool_calls")
        if message["role"] == "tool" and is_called:
            name = names.get(str(message.get("tool_call_id")), message.get("name"))
            responses.append({"name": name, "response": message["content"]})
            joined[-1]["tool_responses"] = responses
        elif is_called and responses and message["role"] == "assistant" and not (calls or joined[-1]["content"]):
            joined[-1]["content"] = message["content"]
            is_called = False
        else:
            joined.append(message)
            is_called = isinstance(calls, list) and bool(calls)
            if isinstance(calls, list):
                names, responses = dict(map(_id_and_name, calls)), []
    return joined


def _id_and_name(call: object) -> tuple[str, object]:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return "", None
    return str(call.get("id")), function.get("name")


# ---- Variables ----------------------------------------------------------------------------------------------------------
# The variables that chat templates read besides the messages, under all their names.

Variables = Mapping[str, object]
Tools = Sequence[Mapping[str, object]]

_PRESERVE = {"preserve_thinking": True, "clear_thinking": False, "truncate_history_thinking": False, "drop_thinking": False}
"""Template variables that decide whether earlier reasoning stays in the prompt, each with the value that keeps it."""


def make_variables(given: Variables, tools: Tools | None, *, thinks: bool, takes_functions: bool) -> dict[str, object]:
    """Return the variables of a prompt: our defaults, replaced by the values in `given`.

    A variable for which templates have several names is set under all of them.

    thinks: the value of `enable_thinking` if `given` has none.
    takes_functions: the template reads `functions` instead of `tools`.
    """
    now = datetime.now()
    variables: dict[str, object] = {
        "strftime_now": now.strftime,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
        "enable_thinking": thinks,
        "preserve_reasoning": True,
    }
    if tools:
        variables["tools"] = tools
    if takes_functions:
        functions = [tool.get("function") for tool in tools or ()]
        variables["functions"] = json.dumps(functions, ensure_ascii=False, indent=4) if functions else ""
    variables |= given
    if isinstance(keeps := variables["preserve_reasoning"], bool):
        variables = {name: value if keeps else not value for name, value in _PRESERVE.items()} | variables
    if "reasoning_effort" in variables:
        variables.setdefault("reasoning_strength", variables["reasoning_effort"])
    return variables


class ChatTemplate:
    """A Jinja chat template in the form of a model's `tokenizer.chat_template`.

    source: the template's text.
    digest: the SHA-256 of the text.
    bos, eos: the texts of these tokens.
    controls: the spellings of the tokens that only a template may write.
    between: called every few milliseconds while rendering. An exception from `between` ends the rendering.

    Raises TemplateError, with the line of the error, if the source is not Jinja.
    """

    def __init__(
        self,
        source: str,
        bos: str,
        eos: str,
        controls: Spellings | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        self.source, self.between = source, between
        self.digest = sha256(source.encode(errors="surrogatepass")).hexdigest()
        self._template = Template(source)
        self._controls = controls or Spellings(())
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._features = learn(self._try)
        self._shapes = learn_shapes(self._try_shape)

    @property
    def thinks(self) -> bool:
        """Whether the model reasons before its answer, unless `enable_thinking` is false."""
        return self._features.thinks

    @property
    def shows_calls(self) -> bool:
        """Whether the template shows the tool calls of an answer."""
        return self._shapes.shows_calls

    @property
    def capabilities(self) -> dict[str, bool]:
        """What the template can show, by llama-server's names."""
        features = self._features
        return {
            "supports_string_content": not features.parts,
            "supports_typed_content": features.parts or features.takes_lists,
            "supports_tools": self.knows("tools"),
            "supports_tool_calls": self.knows("tool_calls"),
            "supports_parallel_tool_calls": self.knows("tool_calls"),
            "supports_system_role": self._shapes.takes("", "system"),
            "supports_preserve_reasoning": self.knows("reasoning_content"),
            "supports_reasoning_effort": self.knows("reasoning_effort"),
            "supports_object_arguments": self.knows("tool_calls") and not features.text_arguments,
        }

    def knows(self, name: str) -> bool:
        """Return whether the template reads a variable, or a field of a message, with this name, such as `tools`."""
        return name in self._template.names

    def pieces(
        self,
        messages: Sequence[Message],
        variables: Variables | None = None,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
    ) -> list[TextPiece]:
        """Render a conversation. The joined pieces are the template's output.

        The template renders the conversation twice: as it is, and with placeholders. Each content has a placeholder, and so
        does any other text of a client that contains or may complete a special token. In the result, each text that has a
        placeholder is a piece, in the form in which the template shows the text: unchanged, trimmed, without its reasoning,
        or quoted for JSON. If the template changes a text in a way that is not listed here, all texts are inserted
        unchanged.

        variables: further variables of the template.

        Raises TemplateError.
        """
        said = self._shapes.take(read_messages(messages, self._features.takes_lists))
        # The renderings of one request share one clock.
        settings = self._variables(variables or {}, tools, self._features)
        settings["add_generation_prompt"] = add_generation_prompt
        real = self._render(settings, said, Unmarked())
        whole = Marks(self._controls)
        marked = self._render(settings, said, whole)
        pieces = whole.cut(marked, real)
        if pieces is None and any(REASONING_TAG.search(text) for one in said for run in one.runs for _, text in run):
            # The template may look for reasoning tags, so this rendering keeps them.
            tagged = Marks(self._controls, keeps_tags=True)
            pieces = tagged.cut(self._render(settings, said, tagged), real)
        return whole.fill(marked) if pieces is None else pieces

    def continued(
        self,
        messages: Sequence[Message],
        variables: Variables | None = None,
        *,
        tools: Tools | None = None,
    ) -> list[TextPiece]:
        """Render a conversation up to the end of its last message, which is an answer that the model is to continue.

        The last piece is the answer so far: its content or, if it has no content yet, its reasoning. An answer with neither
        content nor reasoning has no piece. Raises TemplateError, also if reasoning is to be continued and the template shows
        none.
        """
        *before, last = messages
        content = prefilled_content(last, f"messages[{len(before)}].content")
        prefilled = content or str(last.get("reasoning_content") or "")
        part: Part = "content" if content or not prefilled else "reasoning"
        whole = [*before, {**last, "content": content}]
        try:
            pieces = self.pieces(whole, variables, tools=tools, add_generation_prompt=False)
        except TemplateError:  # some templates require a user message at the end
            pieces = []
        ends = [at for at, piece in enumerate(pieces) if piece.message == len(before) and piece.part == part]
        if ends:
            *shown, end = pieces[: ends[-1] + 1]
            return [*shown, replace(end, text=_untrimmed(end.text, prefilled))]
        # After the first text of the answer, reasoning would come too late.
        pieces = self.pieces(before, {**(variables or {}), "enable_thinking": part == "reasoning"}, tools=tools)
        if part == "reasoning" and not _opens_reasoning(pieces):
            raise TemplateError("the chat template shows no reasoning, so there is none to continue")
        return [*pieces, TextPiece(prefilled, len(before), part=part)] if prefilled else pieces

    def _variables(self, given: Variables, tools: Tools | None, features: TemplateFeatures) -> dict[str, object]:
        return make_variables(given, tools, thinks=features.thinks, takes_functions=not self.knows("tools"))

    def _render(
        self,
        settings: Mapping[str, object],
        said: Sequence[TemplateMessage],
        marks: Unmarked,
        features: TemplateFeatures | None = None,
    ) -> str:
        features = features or self._features
        nones = {"tools": None, "documents": None} if features.nones else {}
        shown = features.show(said, marks)
        variables = {**nones, **self._tokens, **marks.values(settings), "messages": shown}
        return self._template.render(variables, self.between)

    def _try(self, features: TemplateFeatures, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Render messages to learn features. Return "" if the template refuses the messages."""
        settings = self._variables({}, None, features) | {"add_generation_prompt": add_generation_prompt}
        try:
            return self._render(settings, read_messages(messages, features.takes_lists), Unmarked(), features)
        except TemplateError:
            return ""

    def _try_shape(self, said: Sequence[TemplateMessage], tools: Tools | None) -> str:
        """Render a history to learn which histories the template accepts. Return "" if the template refuses the history."""
        prompts = not said or said[-1].role != "assistant" or bool(said[-1].fields.get("tool_calls"))
        settings = self._variables({}, tools, self._features) | {"add_generation_prompt": prompts}
        try:
            return self._render(settings, said, Unmarked())
        except TemplateError:
            return ""


def _opens_reasoning(pieces: Sequence[TextPiece]) -> bool:
    """Return whether a prompt ends with the tag that opens reasoning."""
    return bool(pieces) and pieces[-1].message is None and pieces[-1].text.rstrip().endswith(REASONING_STARTS)


def _untrimmed(shown: str, content: str) -> str:
    """Return what a template shows of a content, but with the content's own trailing blanks.

    The rest of the answer will follow these blanks.
    """
    return content if shown.strip() == content.strip() else shown.rstrip() + content[len(content.rstrip()) :]
