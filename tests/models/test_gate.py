"""The trial of a library before it is used, and what makes one build another one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from slotcache.models import builds, cards, gate, hardware, llama, trial
from slotcache.models.demo import FILE
from slotcache.models.errors import ModelError
from slotcache.models.hardware import Device, devices
from slotcache.models.model import Model
from slotcache.server.config.settings import Settings
from slotcache.server.engine.fit import card_flag
from support.on_device import keep_hidden

from models.test_llama import LIBRARY, starts


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gate.check.cache_clear()
    yield
    gate.check.cache_clear()


def ending(code: str):
    """A child that runs this code instead of the trial."""
    return lambda *_: [sys.executable, "-c", code]


def verdicts(folder: Path) -> list[Path]:
    """Those of the trial with a model; its process has kept another one, of loading the library."""
    return list(folder.glob("cache/slotcache/libraries/computes-*"))


def test_this_library_passes_and_is_tried_once(tmp_path, monkeypatch):
    gate.check()
    (kept,) = verdicts(tmp_path)
    assert kept.read_text() == trial.PASSED
    gate.check.cache_clear()
    monkeypatch.setattr(gate, "command", ending("raise SystemExit('tried again')"))
    gate.check()


def emptied(kept: Path) -> None:
    kept.write_bytes(b"")


def overwritten(kept: Path) -> None:
    kept.write_bytes(os.urandom(1 << 16))


def a_folder(kept: Path) -> None:
    kept.unlink()
    kept.mkdir()


@pytest.mark.parametrize("spoil", [emptied, overwritten, a_folder])
def test_a_verdict_that_was_spoilt_is_none(tmp_path, monkeypatch, spoil):
    gate.check()
    spoil(*verdicts(tmp_path))
    gate.check.cache_clear()
    monkeypatch.setattr(gate, "command", ending("raise SystemExit('tried again')"))
    with pytest.raises(ModelError, match="tried again"):
        gate.check()


def test_a_verdict_is_of_these_files_on_this_cpu(tmp_path, monkeypatch):
    folder = tmp_path / "lib"
    shutil.copytree(LIBRARY.parent, folder)
    tried = f"open({str(tmp_path / 'tried')!r}, 'a').write('.'); print('passed')"

    def times() -> int:
        assert trial.failure(folder / LIBRARY.name, "computes", [sys.executable, "-c", tried]) == ""
        return len((tmp_path / "tried").read_text())

    assert (times(), times()) == (1, 1)
    monkeypatch.setattr(trial, "instructions", lambda: ["avx2"])  # a home that two machines share
    assert (times(), times()) == (2, 2)
    with (folder / "libggml-of-another.so").open("w"):
        assert (times(), times()) == (3, 3)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    assert (times(), times()) == (4, 4)
    assert len(verdicts(tmp_path)) == 4


def test_kv_is_of_this_cpu(monkeypatch):
    here = gate.identity.__wrapped__()
    assert here == gate.identity()
    monkeypatch.setattr(gate, "instructions", lambda: ["avx2"])
    assert gate.identity.__wrapped__() != here


@pytest.mark.parametrize(
    "info, found",
    [
        (
            "model name\t: A\nflags\t\t: fpu sse2 ibrs avx2 avx512f stibp fma\nflags\t\t: none",
            ["avx2", "avx512f", "fma", "sse2"],
        ),
        ("processor\t: 0\nFeatures\t: fp asimd sve\nCPU part\t: 0xd40", ["asimd", "fp", "sve"]),
        ("", [trial.platform.processor()]),
    ],
)
def test_the_instructions_of_a_cpu(tmp_path, info, found):
    (tmp_path / "cpuinfo").write_text(info)
    assert trial.instructions(tmp_path / "cpuinfo") == found


def test_without_a_cache_folder_it_is_tried_each_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    gate.check()
    gate.check.cache_clear()
    monkeypatch.setattr(gate, "command", ending("raise SystemExit('tried again')"))
    with pytest.raises(ModelError, match="tried again"):
        gate.check()


def test_processes_that_start_at_once_keep_one_verdict(tmp_path):
    code = "from slotcache.models import gate; gate.check()"
    start = gate.command("models.gate")
    start[start.index("-c") + 1] = start[start.index("-c") + 1].partition("import_module(sys.argv[2])")[0] + code
    children = [subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(3)]
    assert [child.communicate() for child in children] == [(b"", None)] * 3
    assert len(verdicts(tmp_path)) == 1


@pytest.mark.parametrize(
    "code, reason",
    [
        ("import os; os.abort()", "ended the process: Aborted"),
        ("raise SystemExit('it is computed wrongly')", "it is computed wrongly"),
        ("import sys; print('passed'); sys.exit('no such symbol')", "no such symbol"),
        ("print('noise')", "noise"),
        ("pass", "ended the process without a word"),
        ("import sys; print(sys.stdin.read()); sys.exit('reads')", "reads"),
    ],
)
def test_a_library_that_fails_is_refused_in_one_line_each_time(tmp_path, monkeypatch, code, reason):
    monkeypatch.setattr(gate, "command", ending(code))
    for _ in range(2):
        with pytest.raises(ModelError) as refused:
            gate.check()
        where = f"llama.cpp of {llama.LIBRARY} is refused: {LIBRARY}"
        assert str(refused.value) == f"{where} fails a trial with a small model: {reason}; {llama.REMEDY}"
    assert not verdicts(tmp_path)


def test_what_a_library_prints_is_no_verdict(monkeypatch):
    monkeypatch.setattr(gate, "command", ending("print('at first'); print('passed'); print('at its end')"))
    gate.check()


def test_kv_that_comes_back_otherwise_is_seen(monkeypatch):
    restore = llama.llama_state_seq_set_data_ext

    def restored_otherwise(context, source, size, sequence, flags):
        data = np.ctypeslib.as_array((llama.ctypes.c_uint8 * size).from_address(source))
        data[-64:] ^= 1
        return restore(context, source, size, sequence, flags)

    assert gate.trial() == trial.PASSED
    monkeypatch.setattr(llama, "llama_state_seq_set_data_ext", restored_otherwise)
    assert gate.trial() == "KV does not come back as it was saved"


def test_a_sampler_that_chooses_otherwise_is_seen(monkeypatch):
    monkeypatch.setattr(llama, "llama_sampler_apply", lambda *_: None)
    assert gate.trial() == "it is computed wrongly"


def test_a_build_is_known_by_its_bytes_and_not_by_its_place(tmp_path):
    same, other = (shutil.copytree(LIBRARY.parent, tmp_path / name) for name in ("same", "other"))
    with (other / LIBRARY.name).open("ab") as file:
        file.write(b"built anew")
    code = "from slotcache.models.gate import identity; print(identity())"
    printed = [starts(folder, code).stdout.strip() for folder in (same, other)]
    assert printed[0] == gate.identity() != printed[1] != ""


@pytest.mark.skipif(llama.LIBRARY.origin != "llama-cpp-python", reason="a library with libggml-cpu.so beside it")
def test_a_part_that_was_cut_short_is_refused_before_this_process_needs_it(tmp_path):
    folder = tmp_path / "lib"
    shutil.copytree(LIBRARY.parent, folder)
    part = folder / "libggml-cpu.so.0"
    os.truncate(part, part.stat().st_size // 2)
    done = starts(folder, "import sys; from slotcache.server.cli import main; sys.exit(main(['doctor']))")
    assert done.returncode == 2 and "libllama.so cannot be loaded: " in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_trial_as_a_process_prints_its_result():
    done = subprocess.run(gate.command("models.gate"), capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == trial.PASSED


# ---- The trial on a card ------------------------------------------------------------------------------------------------


def tried(tmp_path: Path, code: str, **given) -> str:
    """Why a child that runs this code fails as a trial whose failures are kept."""
    return trial.failure(LIBRARY, "on-card", [sys.executable, "-c", code], keeps=True, **given)


def kept_results(tmp_path: Path) -> list[str]:
    return [file.read_text() for file in tmp_path.glob("cache/slotcache/libraries/on-card-*")]


COMPLAINT = f"import os, sys; print('{trial.COMPLAINS}CUDA error: no kernel image', '{trial.COMPLAINS}  device 0',"


@pytest.mark.parametrize(
    "code, reason",
    [
        ("raise SystemExit('it finds no card')", "it finds no card"),
        ("import os; os.abort()", "ended the process: Aborted"),
        (f"{COMPLAINT} 'ggml-cuda.cu:98: CUDA error', sep='\\n', file=sys.stderr, flush=True); os.abort()",
         "ended the process: Aborted: CUDA error: no kernel image"),
        ("import os, sys; print('ggml.c:7: GGML_ASSERT(a) failed', file=sys.stderr, flush=True); os.abort()",
         "ended the process: Aborted: ggml.c:7: GGML_ASSERT(a) failed"),
    ],
)  # fmt: skip
def test_a_failure_on_a_card_is_kept_until_its_file_is_removed(tmp_path, code, reason):
    reported = tried(tmp_path, code)
    (file,) = tmp_path.glob("cache/slotcache/libraries/on-card-*")
    assert reported == f"{reason} (kept in {file}: remove it to try again)"
    assert tried(tmp_path, "print('passed')") == reported and kept_results(tmp_path) == [f"{trial.FAILED}{reason}"]
    file.unlink()
    assert tried(tmp_path, "print('passed')") == "" and kept_results(tmp_path) == [trial.PASSED]


def test_a_card_that_hangs_is_not_waited_for_again(tmp_path):
    reported = tried(tmp_path, "import time; time.sleep(600)", patience=0.1)
    assert reported.startswith("did not end within 0.1 s (kept in ") and reported == tried(tmp_path, "print('passed')")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_trial_that_somebody_ended_is_no_failure_of_the_card(tmp_path, number):
    assert tried(tmp_path, f"import os, signal; os.kill(os.getpid(), signal.{number})").startswith("ended the process: ")
    assert not kept_results(tmp_path)


def test_a_server_that_is_asked_to_exit_ends_its_trial(tmp_path):
    asked = []
    reported = tried(
        tmp_path, "import time; time.sleep(600)", patience=600, goes_on=lambda: len(asked) > 3 or asked.append(1)
    )
    assert reported == "was not tried to its end" and not kept_results(tmp_path)


def test_a_failure_that_was_spoilt_is_none(tmp_path):
    tried(tmp_path, "raise SystemExit('it finds no card')")
    for spoil in (emptied, overwritten, a_folder):
        (file,) = tmp_path.glob("cache/slotcache/libraries/on-card-*")
        spoil(file)
        assert tried(tmp_path, "raise SystemExit('again')").startswith("again")
        if file.is_dir():
            file.rmdir()


CARD = Device("Vulkan0", "a card", "GPU", 1 << 30, 1 << 30)


@pytest.fixture
def found(monkeypatch):
    """This process finds a card, and its trial is a child with other code, which the test sets. What it hides comes back."""
    keep_hidden(monkeypatch)
    cpu = devices()[-1:]
    monkeypatch.setattr(gate, "devices", lambda: cpu if hardware.is_without_card() else [CARD, *cpu])
    hardware.unused_card.cache_clear()
    yield lambda code: monkeypatch.setattr(builds, "command", ending(code))
    hardware.unused_card.cache_clear()


WHY = "Vulkan0 (a card) is not used: it fails a trial with a small model: it is computed wrongly (kept in "


def test_a_card_that_fails_is_excluded_and_reported(found):
    found("raise SystemExit('it is computed wrongly')")
    gate.exclude_failing_card()
    assert all(os.environ[name] == value for name, value in hardware.HIDDEN.items())
    assert os.environ[llama.VARIABLES[0]] == str(LIBRARY.parent), "what it starts has the same library"
    assert hardware.unused_card().startswith(WHY)
    found("raise SystemExit('tried again')")
    gate.exclude_failing_card()
    assert hardware.unused_card().startswith(WHY)


@pytest.mark.parametrize(
    "given, flag",
    [
        ({"gpu_layers": 7}, "-ngl 7"),
        ({"gpu_layers": -2, "device": "Vulkan0"}, "-ngl all"),
        ({"device": "Vulkan0"}, "--device Vulkan0"),
        ({"device": "none"}, ""),
        ({"gpu_layers": 0, "device": "Vulkan0"}, ""),
        ({}, ""),
    ],
)
def test_layers_that_a_flag_gives_to_a_card_that_fails_are_refused(found, given, flag):
    assert card_flag(Settings(**given)) == flag
    found("raise SystemExit('it is computed wrongly')")
    if not flag:
        return
    with pytest.raises(ModelError) as refused:
        gate.exclude_failing_card(flag)
    assert str(refused.value).startswith(f"{flag}: {WHY}")
    assert str(refused.value).endswith(f"; without {flag.split()[0]} the CPU computes") and not hardware.is_without_card()


def test_a_card_that_passes_stays_and_the_log_reports_a_trial_under_way(found, caplog):
    found("import time; time.sleep(0.5); print('passed')")
    with caplog.at_level("INFO", "slotcache"):
        for _ in range(2):
            gate.exclude_failing_card("-ngl 7")
    logged = [line for line in caplog.messages if line.startswith("trying the llama.cpp of ")]
    assert len(logged) == 1 and logged[0].endswith("on the card, once for this driver: 0 s so far, 300 at most")
    assert not hardware.is_without_card() and not llama.PASSED_OVER


def test_a_trial_that_was_stopped_says_nothing_of_the_card(found, tmp_path):
    found("import time; time.sleep(600)")
    with pytest.raises(ModelError, match="the trial on Vulkan0 \\(a card\\) was stopped"):
        gate.exclude_failing_card("", lambda: False)
    assert not hardware.is_without_card() and not llama.PASSED_OVER and not kept_results(tmp_path)


def test_a_trial_reports_to_the_log_from_time_to_time(tmp_path, caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(builds, "monotonic", lambda: now[0])
    waiting = builds.TrialProgress(tmp_path, lambda: True)
    with caplog.at_level("INFO", "slotcache"):
        for now[0] in (0.1, 1.0, 14.9, 15.1, 16.0, 31.0):
            assert waiting()
    assert [line.rpartition(": ")[2].split()[0] for line in caplog.messages] == ["0", "15", "31"]


def test_without_a_card_nothing_is_tried(found, monkeypatch):
    monkeypatch.setattr(gate, "devices", lambda: devices()[-1:])
    found("raise SystemExit('it finds no card')")
    gate.exclude_failing_card()
    assert not hardware.is_without_card()


def test_a_process_without_a_card_gives_llama_cpp_no_devices(found, monkeypatch):
    """Else large batches are computed on a card, whatever holds the weights."""
    given, load = [], llama.llama_model_load_from_file

    def loads(path, params):
        given.append(bool(params.devices) and llama.ctypes.c_void_p.from_address(params.devices).value is None)
        return load(path, params)

    monkeypatch.setattr(llama, "llama_model_load_from_file", loads)
    for value, is_empty in (("", False), ("1", True)):
        monkeypatch.setenv(cards.NO_CARD, value)
        Model(FILE).close()
        assert given.pop() == is_empty


def test_a_variable_leaves_all_cards_alone(found, monkeypatch):
    assert hardware.unused_card() == ""
    monkeypatch.setenv(cards.NO_CARD, "1")
    hardware.unused_card.cache_clear()
    assert hardware.unused_card() == "SLOTCACHE_NO_CARD is set: no card computes"
    assert not any(device.is_gpu for device in devices())


def test_the_trial_on_the_cpu_leaves_cards_alone(tmp_path, monkeypatch):
    code = "import os, sys; sys.exit(os.environ['SLOTCACHE_NO_CARD'] + ' ' + os.environ['SLOTCACHE_LLAMA'])"
    monkeypatch.setattr(gate, "command", ending(code))
    with pytest.raises(ModelError, match=f"small model: 1 {LIBRARY.parent};"):
        gate.check()
