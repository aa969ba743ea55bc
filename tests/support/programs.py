"""Long sessions of known programs, as they send them: instructions, tools, calls, results and reminders.

Each function yields a program's requests in order, with the answers of an imagined obedient model. So a session is the same
for every model and template.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
INSTRUCTIONS = "You work in a folder of the user's. Read before you write, and say what you did in a few words."


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a program. last: the text at the end of its history, as the model reads it."""

    path: str
    body: Body
    last: str


def _schema(*names: str) -> Body:
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": list(names)}


def _result(turn: int) -> str:
    return f"{turn}\timport sys\n{turn + 1}\tprint(sys.argv[{turn}])\nend of result {turn}"


@dataclass(slots=True)
class _Session:
    """The messages of a session so far."""

    said: list[Body] = field(default_factory=list)

    def add(self, *messages: Body) -> None:
        self.said.extend(messages)

    def copy(self) -> list[Body]:
        return json.loads(json.dumps(self.said))


def claude_code(turns: int) -> Iterator[Turn]:
    """A billing line before the instructions, reminders beside questions and results, and a cache mark that moves on."""
    bill = "x-anthropic-billing-header: cc_version=2.1.77.{:03x}; cc_entrypoint=cli; cch={:05x};"
    tools = [
        {"name": name, "description": f"{name} a file.", "input_schema": _schema(*names)}
        for name, names in {"Read": ["file_path"], "Edit": ["file_path", "old_string", "new_string"]}.items()
    ]
    marked = {"cache_control": {"type": "ephemeral"}}
    session, last = _Session(), ""
    for turn in range(turns):
        id = f"toolu_01{turn:022}"
        reminder = f"<system-reminder>\nThe todo list is empty, {turn}.\n</system-reminder>"
        match turn % 5:
            case 0 | 3:
                last = f"What does file {turn} do?"
                parts = [{"type": "text", "text": reminder}, {"type": "text", "text": last}]
                session.add({"role": "user", "content": parts})
            case 4:  # a reminder after the result
                last = reminder
                parts = [{"type": "tool_result", "tool_use_id": id, "content": _result(turn)}]
                session.add({"role": "user", "content": [*parts, {"type": "text", "text": reminder}]})
            case 1:
                last = f"end of result {turn}"
                content = [{"type": "text", "text": _result(turn)}]
                session.add({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": content}]})
            case 2:  # two results for one answer, one of them an error
                last = f"No such file {turn}"
                parts = [
                    {"type": "tool_result", "tool_use_id": id, "content": _result(turn)},
                    {"type": "tool_result", "tool_use_id": id + "b", "is_error": True, "content": last},
                ]
                session.add({"role": "user", "content": parts})
        messages = session.copy()
        messages[-1]["content"][-1].update(marked)
        body = {
            "model": "claude-sonnet-4-5",
            "max_tokens": 4,
            "system": [
                {"type": "text", "text": bill.format(0xD9, turn)},
                {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", **marked},
                {"type": "text", "text": INSTRUCTIONS, **marked},
            ],
            "tools": tools,
            "messages": messages,
            "metadata": {"user_id": "user_0_account__session_1"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stream": turn % 2 == 0,
        }
        yield Turn("/v1/messages?beta=true", body, last)
        following = f"toolu_01{turn + 1:022}"
        call = {"type": "tool_use", "id": following, "name": "Read", "input": {"file_path": f"/work/{turn}.py"}}
        text = {"type": "text", "text": f"I look at file {turn}."}
        match turn % 5:
            case 0 | 3:
                session.add({"role": "assistant", "content": [text, call]})
            case 1:
                session.add({"role": "assistant", "content": [call, {**call, "id": following + "b"}]})
            case _:
                session.add({"role": "assistant", "content": [text]})


def codex(turns: int) -> Iterator[Turn]:
    """Developer messages at the start and in the middle, encrypted reasoning, custom tools, and nothing stored."""
    tools = [
        {"type": "function", "name": "shell", "description": "Run it.", "strict": False, "parameters": _schema("command")},
        {"type": "function", "name": "update_plan", "description": "Plan.", "strict": False, "parameters": _schema("plan")},
        {"type": "custom", "name": "apply_patch", "description": "Patch files.", "format": {"type": "text"}},
        {"type": "web_search", "external_web_access": False},
    ]
    permissions = "<permissions instructions>\nNothing is asked for.\n</permissions instructions>"
    place = "<environment_context>\n  <cwd>/work</cwd>\n  <shell>bash</shell>\n</environment_context>"
    session, last = _Session(), ""

    def said(role: str, *texts: str) -> Body:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}

    session.add(said("developer", permissions), said("user", "# AGENTS.md instructions for /work\n\nBe brief.", place))
    for turn in range(turns):
        id = f"call_{turn:024}"
        match turn % 5:
            case 0:
                last = f"What does file {turn} do?"
                session.add(said("user", last))
            case 1:
                last = f"end of result {turn}"
                session.add({"type": "function_call_output", "call_id": id, "output": f"Exit code: 0\n{_result(turn)}"})
            case 2:
                last = f"Success. {turn}"
                session.add({"type": "custom_tool_call_output", "call_id": id, "output": last})
            case 3:  # a hint from the program in the middle, as after a change of its mode
                last = f"And the next one, {turn}?"
                session.add(
                    said("developer", f"<collaboration_mode>Default {turn}</collaboration_mode>"), said("user", last)
                )
            case 4:
                last = f"<turn_aborted>\nThe user interrupted turn {turn}.\n</turn_aborted>"
                session.add({"type": "function_call_output", "call_id": id, "output": "aborted"}, said("user", last))
        body = {
            "model": "gpt-5-codex",
            "max_output_tokens": 4,
            "instructions": INSTRUCTIONS,
            "input": session.copy(),
            "tools": tools,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": turn % 2 == 0,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "01990000-0000-7000-8000-000000000000",
            "text": {"verbosity": "medium"},
            "client_metadata": {"x-codex-installation-id": "0"},
        }
        yield Turn("/v1/responses", body, last)
        following = f"call_{turn + 1:024}"
        thought = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAAB" + "x" * 40}
        arguments = json.dumps({"command": f"cat {turn}.py"})
        call = {"type": "function_call", "name": "shell", "arguments": arguments, "call_id": following}
        patch = {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin Patch", "call_id": following}
        match turn % 5:
            case 0:
                session.add(thought, said("assistant", f"I look at file {turn}."), call)
            case 1:
                session.add({**patch, "status": "completed"})
            case 3:
                session.add(thought, call)
            case _:
                session.add(said("assistant", f"File {turn} prints."))


def opencode(turns: int) -> Iterator[Turn]:
    """Two system messages at the start, calls without content, and a user's text after results."""
    tools = [
        {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": _schema("filePath")}}
        for name in ("read", "glob")
    ]
    session, last = _Session(), ""
    session.add({"role": "system", "content": INSTRUCTIONS}, {"role": "system", "content": "<env>\n  /work\n</env>"})
    for turn in range(turns):
        id = f"call_{turn:08}"
        if turn % 4 in (0, 3):
            last = f"What does file {turn} do?"
            session.add({"role": "user", "content": last})
        else:
            last = f"end of result {turn}"
            session.add({"role": "tool", "tool_call_id": id, "content": _result(turn)})
            if turn % 4 == 2:
                last = f"Summarize the task tool output {turn} and continue."
                session.add({"role": "user", "content": [{"type": "text", "text": last}]})
        body = {
            "model": "local/any",
            "max_tokens": 4,
            "temperature": 0,
            "messages": session.copy(),
            "tools": tools,
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield Turn("/v1/chat/completions", body, last)
        function = {"name": "read", "arguments": json.dumps({"filePath": f"/work/{turn}.py"})}
        call = {"id": f"call_{turn + 1:08}", "type": "function", "function": function}
        if turn % 4 in (0, 1):
            session.add({"role": "assistant", "content": ["", None][turn % 4], "tool_calls": [call]})
        else:
            session.add({"role": "assistant", "content": f"File {turn} prints."})


def cline(turns: int) -> Iterator[Turn]:
    """Tools described in words, results as parts of a user's message, and the editor's open tabs after each of them."""
    open_tabs = "<environment_details>\n# Open tabs\n{}.py\n</environment_details>"
    session, last = _Session(), ""
    session.add({"role": "system", "content": f"You are Cline. {INSTRUCTIONS}\n# Tools\n## read_file"})
    for turn in range(turns):
        last = open_tabs.format(turn)
        first = f"[read_file for '{turn}.py'] Result:" if turn else "<task>\nWhat do the files do?\n</task>"
        texts = [first, _result(turn), last] if turn else [first, last]
        session.add({"role": "user", "content": [{"type": "text", "text": text} for text in texts]})
        if turn == 10:  # two messages of the user in a row, as after a stopped answer
            session.add({"role": "user", "content": [{"type": "text", "text": "[TASK RESUMPTION] Go on."}]})
            last = "[TASK RESUMPTION] Go on."
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": "any", "max_tokens": 4, "temperature": 0, "messages": session.copy(), **stream}
        yield Turn("/v1/chat/completions", body, last)
        session.add({"role": "assistant", "content": f"<read_file>\n<path>{turn + 1}.py</path>\n</read_file>"})


def home_assistant(turns: int) -> Iterator[Turn]:
    """Ollama's API: the time in the system message, calls without ids, results as JSON, various spellings of nothing."""
    parameters = {"type": "object", "properties": {"name": {"type": "string"}, "area": {"type": "string"}}, "required": []}
    tools = [
        {"type": "function", "function": {"name": name, "description": "A device.", "parameters": parameters}}
        for name in ("HassTurnOn", "HassTurnOff", "GetLiveContext")
    ]
    session, last = _Session(), ""
    home = "Static Context: An overview of the areas and the devices in this smart home:\n- names: Lamp\n  areas: Kitchen"
    session.add({"role": "system", "content": f"You are a voice assistant for Home Assistant.\n{home}"})
    for turn in range(turns):
        if turn % 2 == 0:
            last = f"Turn on lamp {turn}"
            session.add({"role": "user", "content": last})
        else:
            last = f"Lamp {turn}"
            session.add({"role": "tool", "content": json.dumps({"speech": {}, "data": {"success": [{"name": last}]}})})
        body = {
            "model": "any",
            "messages": session.copy(),
            "tools": tools,
            "stream": True,
            "keep_alive": "-1s",
            "think": False,
            "options": {"num_ctx": 8192, "num_predict": 4},
        }
        yield Turn("/api/chat", body, last)
        function = {"name": "HassTurnOn", "arguments": {"name": f"Lamp {turn}", "area": None}}
        calls = {"content": "", "thinking": None, "tool_calls": [{"function": function}]}
        session.add({"role": "assistant", **(calls if turn % 2 == 0 else {"content": f"Lamp {turn} is on."})})


PROGRAMS: dict[str, Callable[[int], Iterator[Turn]]] = {
    one.__name__: one for one in (claude_code, codex, opencode, cline, home_assistant)
}
