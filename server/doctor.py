"""`slotcache doctor`: reports on llama.cpp and its speed, on the devices, and on a model's template and memory."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from ..models import gate, libraries, llama
from ..models.demo import FILE
from ..models.errors import ModelError
from ..models.hardware import (
    devices,
    fast_cores,
    free_memory,
    supports_offload,
    unloaded_backends,
    unused_card,
    unused_features,
    used_features,
)
from ..models.times import summarize, times_on
from .config.settings import Settings, SettingsError
from .engine.fit import card_flag, fit, open_model
from .load import describe_template, open_template
from .serve import model_path


def doctor(settings: Settings, times: bool = False) -> int:
    """Print the report and return the exit code.

    The code is 2 if llama.cpp fails its trial, if a setting is wrong, or if the model cannot be read or does not fit.

    times: whether to measure the speed of each installed llama.cpp, too.
    """
    try:
        _print_library(settings)
        _print_devices(settings)
        if settings.model or settings.hf_repo:
            settings = replace(settings, model=str(model_path(settings)))
            _print_fit(settings)
        if times:
            _print_times(settings)
    except (ModelError, SettingsError) as error:
        print(f"slotcache: {error}", file=sys.stderr)
        return 2
    return 0


def _print_library(settings: Settings) -> None:
    """Print llama.cpp's library, which of its files are in use, and which features of the CPU it does not use.

    A GPU is tried in the same way as when a server starts with these settings. Raises ModelError.
    """
    print(f"{llama.LIBRARY}: llama.cpp {llama.llama_version().decode()}, {llama.LIBRARY.path}")
    gate.check()
    used = used_features()
    print(f"  in use: {', '.join(path.name for path in gate.files_in_use())}")
    print(f"  made for: {', '.join(used)}")
    print("  tried: the KV of a small model is unchanged after it is saved and restored")
    gate.exclude_failing_card(card_flag(settings))
    if on := [str(device) for device in devices() if device.is_gpu]:
        print(f"  tried on {', '.join(on)}: it works there, too")
    if unused := unused_features(used):
        print(f"  faster: a build that uses {', '.join(unused)} of this CPU; `make native` compiles one")


def _print_devices(settings: Settings) -> None:
    found = devices()
    for device in found:
        free = free_memory() if device.kind == "CPU" else device.free
        memory = f"{free / 2**30:.1f} of {device.total / 2**30:.1f} GiB free" if device.total else "memory unknown"
        print(f"  {device.name}: {device.description} ({device.kind}), {memory}")
        for model, times in times_on(device):
            print(f"    timed with {model}: {summarize(times)}")
    print(f"  threads that compute (-t): {settings.threads or fast_cores()}")
    for name, reason in unloaded_backends().items():
        print(f"  not loaded: {name}: {reason}")
    if line := unused_card():
        print(f"GPU offload: no. {line}")
    elif not supports_offload():
        print("GPU offload: not in this build, and no card was found")
    elif not any(device.is_gpu for device in found):
        print("GPU offload: in this build, but no GPU was found")
    else:
        print("GPU offload: yes, all layers that fit by default (-ngl)")


def _print_fit(settings: Settings) -> None:
    """Print the model's template, and how the model would fit into memory now. Raises ModelError and SettingsError."""
    path = Path(settings.model).expanduser()
    model = open_model(settings, path, is_simulated=True)
    per_token = model.kv_bytes(settings.cache_type_k, settings.cache_type_v)
    print(f"{path.name}: {model.description}, {model.size / 2**30:.2f} GiB, {model.num_layers} layers")
    print(f"  KV: {per_token:,} bytes a token with -ctk {settings.cache_type_k} -ctv {settings.cache_type_v}")
    if model.can_chat:
        print(f"  {describe_template(settings, model, open_template(settings, model))}")
    for line in model.without_effect():
        print(f"  {line}")
    model.close()
    _, decision = fit(settings, path)
    for line in decision.lines() if decision else ():
        print(f"  {line}")


def _print_times(settings: Settings) -> None:
    """Print the speed of each installed llama.cpp, and which llama.cpp would be faster than the one in use."""
    path = Path(settings.model).expanduser() if settings.model else FILE
    threads = settings.threads or fast_cores()
    offload = settings.gpu_layers, settings.device, settings.split_mode, settings.tensor_split, settings.main_gpu
    speeds = libraries.compare(path, threads, offload, lambda line: print(f"  {line}", file=sys.stderr))
    print(
        f"Tokens a second with {path.name} on {threads} threads: prefill of {libraries.PROMPT}, then decode one at a time:"
    )
    for line in libraries.as_table(speeds):
        print(f"  {line}")
    if not settings.model:
        print("  this model is tiny: -m MODEL measures your own")
    unused = unused_features(used_features())
    if best := libraries.faster(speeds):
        print(f"faster: {best}, with {llama.VARIABLES[0]}={best.path}")
    elif unused:
        print(f"faster: probably make native, which compiles a llama.cpp that uses {', '.join(unused)} of this CPU")
    else:
        print("faster: nothing else that is installed here")
