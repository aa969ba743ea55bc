"""Programs of others as they are run without a terminal: a task, twice, against a real server.

`make client-test` installs them, each in an environment of its own.
"""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from server.conftest import DEADLINE, running
from slotcache.bench.random_models import SHAPES, generate

INSTALLED = Path(__file__).parents[2] / ".venv/programs"
BINS = [*sorted(INSTALLED.glob("*/bin")), INSTALLED / "node/node_modules/.bin"]
SDK = INSTALLED / "node/node_modules/@ai-sdk/openai-compatible"
PATH = os.pathsep.join([*map(str, BINS), os.environ["PATH"]])
SAID = "Say hello."
CONTEXT = 65536
LOUDER = np.float16(40)  # than it was: the end of an answer is one of ten likely tokens


@dataclass(frozen=True)
class Program:
    """command: its words, with the server's address and the test's folder in braces. needs: the program; its own name if
    empty. least: tokens that its first prompts have at least, which shows that its own instructions were sent.
    """

    command: str
    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    least: int = 10


def launched(client: str, arguments: str, least: int) -> Program:
    """A coding agent with the settings of `slotcache launch`."""
    command = f"{shlex.quote(sys.executable)} -m slotcache.server.cli launch {client} --port {{port}} -- {arguments}"
    return Program(command, needs=client, least=least)


LLM = "- {{model_id: slotcache, model_name: any, api_base: '{url}/v1'}}"
AI = """\
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { generateText, streamText, tool, jsonSchema } from "ai"

const model = createOpenAICompatible({ name: "slotcache", baseURL: process.argv[2] + "/v1", apiKey: "none" })("any")
const schema = { type: "object", properties: { city: { enum: ["Oslo"] } }, required: ["city"], additionalProperties: false }
const execute = async ({ city }) => "Rain in " + city
const weather = tool({ description: "The weather.", inputSchema: jsonSchema(schema), execute })
const asked = { model, prompt: "Say hello.", maxOutputTokens: 64, temperature: 0 }
const called = await generateText({ ...asked, tools: { weather }, toolChoice: "required" })
console.log(called.toolResults[0].output)
for await (const text of streamText(asked).textStream) process.stdout.write(text)
"""
CHAT = (
    "--openai-api-base {url}/v1 --openai-api-key none --no-git --yes-always --no-check-update --no-analytics --no-gitignore"
)
PROGRAMS = {
    "aider": Program(f"aider --model openai/any {CHAT} --no-show-model-warnings --message '{SAID}'", least=1000),
    "llm": Program(f"llm -m slotcache '{SAID}'", {"extra-openai-models.yaml": LLM}, {"LLM_USER_PATH": "{folder}"}),
    "guidellm": Program(
        "guidellm run --backend kind=openai_http,target={url} --data kind=json_file,path={folder}/prompts.jsonl "
        "--profile kind=synchronous --constraint kind=max_requests,count=2 --output kind=console",
        {"prompts.jsonl": '{{"prompt": "Once upon a time a stone lay by the sea, and", "output_tokens_count": 8}}\n' * 4},
    ),
    "ai": Program("node {folder}/ask.mjs {url}", {"ask.mjs": AI.replace("{", "{{").replace("}", "}}")}, needs="node"),
    "codex": launched("codex", f"exec --skip-git-repo-check '{SAID}'", 5000),
    "opencode": launched("opencode", f"run '{SAID}'", 5000),
    "qwen": launched("qwen", f"-p '{SAID}'", 10_000),
    "crush": launched("crush", f"run '{SAID}'", 5000),
    "claude": launched("claude", f"-p '{SAID}'", 10_000),
    "cline": launched("cline", f"'{SAID}'", 1000),
}


def talkative(path):
    """A random model with room for the instructions of agents, which ends its answers: some agents take none that is cut."""
    reader = GGUFReader(generate(path, replace(SHAPES["tiny"], context=CONTEXT)), "r+")
    (embedding,) = [tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    end = reader.fields["tokenizer.ggml.eos_token_id"].contents()
    blocks = embedding.data[end].reshape(-1, 34)  # of Q8_0: a float16 step, and 32 integers
    blocks[:, :2] = (LOUDER * blocks[:, :2].copy().view(np.float16)).astype(np.float16).view(np.uint8)
    reader.data.flush()
    return path


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A server of a random model with room for the instructions of agents; each prompt opts in to the cache."""
    model = talkative(tmp_path_factory.mktemp("models") / "wide.gguf")
    with running(model, ctx_size=CONTEXT, threads=2, cache_prompt=True, any_model=True, predict=64) as up:
        yield up


def found(name):
    return shutil.which(name, path=PATH)


def run(program, url, folder):
    """Run a program to its end. It finds nothing of this user, and its servers are on this machine alone."""
    places = {"url": url, "port": url.rpartition(":")[2], "folder": folder}
    for name, text in program.files.items():
        (folder / name).write_text(text.format(**places))
    if not (modules := folder / "node_modules").is_symlink():
        modules.symlink_to(INSTALLED / "node/node_modules")
    variables = {name: text.format(**places) for name, text in program.variables.items()}
    usual = {"HOME": str(folder), "PATH": PATH, "NO_PROXY": "127.0.0.1", "CI": "1"}
    command = shlex.split(program.command.format(**places))
    ran = subprocess.run(
        command,
        env=usual | variables,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"


def counted(server):
    """Requests that were answered, those that were not, and computed prompt tokens: of all so far."""
    ends = {
        end: server.metric("slotcache_requests_total", end=end)
        for end in ("stop", "length", "cancelled", "refused", "error")
    }
    answered = ends["stop"] + ends["length"]
    return answered, ends["refused"] + ends["error"], server.metric("slotcache_prompt_tokens_total")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_task_is_done_twice(wide, name, tmp_path):
    """No request is refused, and each program ends well; the second time the prompts come from the cache, as the server has
    --cache-prompt. What a program prints is not asked for: the first token of the made model may be the end of its answer.
    """
    program = PROGRAMS[name]
    if found(program.needs or name) is None or (name == "ai" and not SDK.is_dir()):
        pytest.skip(f"{name} is not installed: make client-test does")
    counts = [counted(wide)]
    for _ in range(2):
        run(program, wide.url, tmp_path)
        counts.append(counted(wide))
    (answered, refused, first), (again, refused_again, second) = (
        [after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(counts)
    )
    assert answered and again and (refused, refused_again) == (0, 0)
    assert first >= program.least and second < first / 2
