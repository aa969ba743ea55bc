"""Loads damaged models one after the other, until llama.cpp ends the process. Arguments: MODEL FOLDER FIRST COUNT.

Prints the outcome of each model in one line.
"""

import contextlib
import random
import resource
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest  # noqa: F401
from gguf import GGUFReader
from slotcache.models.errors import ModelError
from slotcache.models.jinja import TemplateError
from slotcache.models.model import Model
from slotcache.models.model_files import digest
from slotcache.models.named_templates import DEFAULT_TEMPLATE
from slotcache.models.template import ChatTemplate

from support.mutation import mutated

SECONDS = 20  # time for one model
MEMORY = 8 << 30  # most bytes of the process


def main(whole: Path, folder: Path, first: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    content = whole.read_bytes()
    metadata = min(tensor.data_offset for tensor in GGUFReader(whole).tensors)
    path = folder / "damaged.gguf"
    for number in range(first, count):
        path.write_bytes(mutated(content[:metadata], random.Random(number)) + content[metadata:])
        signal.alarm(SECONDS)
        print("case", outcome(path).replace("\n", " "), flush=True)


def outcome(path: Path) -> str:
    try:
        digest([path])
        model = Model(path, gpu_layers=0)
        use(model)
        model.close()
    except ModelError:
        return "refused"
    except Exception as error:
        return f"ours: {type(error).__name__}: {error}"
    return "loaded"


def use(model: Model) -> None:
    """Read all parts of a model that the server reads."""
    model.tokenize("Hello <|im_start|>", special=True)
    model.kv_bytes("f16", "f16")
    _ = model.description, model.can_trim, model.can_chat, model.rope_depends_on_context, model.attention_width
    with contextlib.suppress(TemplateError):
        ChatTemplate(model.chat_template or DEFAULT_TEMPLATE, model.bos, model.eos).pieces(
            [{"role": "user", "content": "Hi"}]
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
