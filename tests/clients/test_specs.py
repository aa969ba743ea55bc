"""Each field that the packages of OpenAI, Anthropic and Ollama know is one that this server knows."""

import pytest
from slotcache.server.api.embeddings import EmbeddingRequest
from slotcache.server.api.messages import MessagesRequest
from slotcache.server.api.ollama import EmbedRequest, GenerateRequest, OldEmbedRequest, OllamaChatRequest
from slotcache.server.api.ollama_models import ModelName
from slotcache.server.api.responses import ResponseRequest
from slotcache.server.chat.body import ChatRequest, OllamaOptions, TextRequest
from slotcache.server.chat.decode import HARMLESS, REFUSED, WISHES

openai, anthropic = pytest.importorskip("openai.types"), pytest.importorskip("anthropic.types")
HEADERS = {"betas"}  # fields of the client, which sends them as headers


def fields(*kinds):
    return {name for kind in kinds for name in kind.__annotations__} - HEADERS


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        (fields(openai.chat.completion_create_params.CompletionCreateParamsBase), ChatRequest),
        (fields(openai.completion_create_params.CompletionCreateParamsBase), TextRequest),
        (fields(openai.responses.response_create_params.ResponseCreateParamsBase), ResponseRequest),
        (fields(openai.EmbeddingCreateParams), EmbeddingRequest),
        (
            fields(
                anthropic.message_create_params.MessageCreateParamsBase,
                anthropic.beta.message_create_params.MessageCreateParamsBase,
            ),
            MessagesRequest,
        ),
    ],
    ids=lambda kind: getattr(kind, "__name__", ""),
)
def test_no_field_of_a_specification_is_unknown(named, kind):
    assert named and named - {*kind.__struct_encode_fields__, *HARMLESS, *REFUSED, *WISHES} == set()


def test_no_field_of_ollama_s_package_is_unknown():
    types = pytest.importorskip("ollama._types")
    pairs = {
        types.ChatRequest: OllamaChatRequest,
        types.GenerateRequest: GenerateRequest,
        types.EmbedRequest: EmbedRequest,
        types.EmbeddingsRequest: OldEmbedRequest,
        types.ShowRequest: ModelName,
        types.PullRequest: ModelName,
    }
    unknown = {
        (theirs.__name__, name)
        for theirs, kind in pairs.items()
        for name in {*theirs.model_fields} - {*kind.__struct_encode_fields__}
    }
    options = {f"options.{name}" for name in OllamaOptions.__struct_encode_fields__}
    unknown |= {f"options.{name}" for name in types.Options.model_fields} - {*options, *HARMLESS, *WISHES}
    assert unknown == {("GenerateRequest", name) for name in ("width", "height", "steps")}, "of pictures"
