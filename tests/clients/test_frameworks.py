"""Frameworks for agents: a tool is called and its result answered, or an answer has the form that is asked for."""

from itertools import pairwise
from typing import Annotated, Any, Literal

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks about themselves
WISH = {"cache_prompt": True}
QUESTION = "What is the weather in Oslo? Ask the function get_weather."
RAIN = "It rains in Oslo, and it will rain tomorrow."


def get_weather(city: Literal["Oslo"]) -> str:
    """Return the weather of a city."""
    return RAIN


def langgraph(url):
    """A graph: a call that must come, the tool, an answer."""
    graph: Any = pytest.importorskip("langgraph.graph")
    prebuilt: Any = pytest.importorskip("langgraph.prebuilt")
    chat: Any = pytest.importorskip("langchain_openai").ChatOpenAI
    model = chat(base_url=f"{url}/v1", api_key="none", model="any", max_tokens=64, temperature=0, extra_body=WISH)
    calling = model.bind_tools([get_weather], tool_choice="required")
    built = graph.StateGraph(graph.MessagesState)
    built.add_node("call", lambda state: {"messages": [calling.invoke(state["messages"])]})
    built.add_node("tools", prebuilt.ToolNode([get_weather]))
    built.add_node("answer", lambda state: {"messages": [model.invoke(state["messages"])]})
    steps = [graph.START, "call", "tools", "answer", graph.END]
    for step, following in pairwise(steps):
        built.add_edge(step, following)
    *_, result, answer = built.compile().invoke({"messages": [("user", QUESTION)]})["messages"]
    return result.content, answer.content


def openai_agents(url):
    """An agent that must call, and one without tools that goes on from there."""
    agents: Any = pytest.importorskip("agents")
    client = pytest.importorskip("openai").AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    agents.set_tracing_disabled(True)
    usual = agents.ModelSettings(max_tokens=64, temperature=0, extra_body=WISH)
    required = usual.resolve(agents.ModelSettings(tool_choice="required"))
    model = agents.OpenAIChatCompletionsModel(model="any", openai_client=client)
    agent = agents.Agent(name="weather", instructions="You tell the weather.", model=model, model_settings=usual)
    tools = [agents.function_tool(get_weather)]
    calling = agent.clone(tools=tools, model_settings=required, tool_use_behavior="stop_on_first_tool")
    called = agents.Runner.run_sync(calling, QUESTION)
    return called.final_output, agents.Runner.run_sync(agent, called.to_input_list()).final_output


def haystack(url):
    """A generator that must call, a component that runs the tool, and the generator again."""
    chat: Any = pytest.importorskip("haystack.components.generators.chat")
    tools: Any = pytest.importorskip("haystack.tools")
    invoker: Any = pytest.importorskip("haystack.components.tools")
    types: Any = pytest.importorskip("haystack.dataclasses")
    secret: Any = pytest.importorskip("haystack.utils").Secret
    weather = tools.create_tool_from_function(get_weather)
    fields = {"max_tokens": 64, "temperature": 0, "extra_body": WISH}
    made = {"api_base_url": f"{url}/v1", "api_key": secret.from_token("none"), "model": "any", "tools": [weather]}
    model = chat.OpenAIChatGenerator(**made, generation_kwargs=fields)
    asked = [types.ChatMessage.from_user(QUESTION)]
    called = model.run(asked, generation_kwargs={**fields, "tool_choice": "required"})["replies"]
    results = invoker.ToolInvoker(tools=[weather]).run(called)["tool_messages"]
    answer = model.run([*asked, *called, *results], generation_kwargs={**fields, "tool_choice": "none"})["replies"][0]
    return results[0].tool_call_result.result, answer.text


@pytest.mark.parametrize("ask", [langgraph, openai_agents, haystack])
def test_a_tool_is_called_and_its_result_answered(served, ask):
    result, answer = ask(served.url)
    assert RAIN in str(result) and answer


def pydantic_ai(url, form):
    package: Any = pytest.importorskip("pydantic_ai")
    models: Any = pytest.importorskip("pydantic_ai.models.openai")
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    settings = {"max_tokens": 64, "temperature": 0, "extra_body": WISH}
    agent = package.Agent(models.OpenAIChatModel("any", provider=provider), output_type=form, model_settings=settings)
    return agent.run_sync("Which day?").output


def pydantic_ai_natively(url, form):
    package: Any = pytest.importorskip("pydantic_ai")
    return pydantic_ai(url, package.NativeOutput(form))


def instructor(url, form):
    package: Any = pytest.importorskip("instructor")
    return asked_by_instructor(url, form, package.Mode.TOOLS)


def instructor_by_schema(url, form):
    package: Any = pytest.importorskip("instructor")
    return asked_by_instructor(url, form, package.Mode.JSON_SCHEMA)


def asked_by_instructor(url, form, mode):
    package: Any = pytest.importorskip("instructor")
    made = pytest.importorskip("openai").OpenAI(base_url=f"{url}/v1", api_key="none")
    fields = {"model": "any", "max_tokens": 64, "temperature": 0, "extra_body": WISH, "max_retries": 0}
    asked: Any = [{"role": "user", "content": "Which day?"}]
    return package.from_openai(made, mode=mode).chat.completions.create(response_model=form, messages=asked, **fields)


@pytest.mark.parametrize("ask", [pydantic_ai, pydantic_ai_natively, instructor, instructor_by_schema])
def test_an_answer_has_the_form_that_is_asked_for(served, ask):
    pydantic: Any = pytest.importorskip("pydantic")
    bounds = pydantic.Field(ge=1, le=7)
    fields = {"day": (Literal["Monday", "Tuesday"], ...), "number": (Annotated[int, bounds], ...)}
    form = pydantic.create_model("Day", **fields)
    answer = ask(served.url, form)
    assert isinstance(answer, form) and answer.day in ("Monday", "Tuesday") and 1 <= answer.number <= 7
