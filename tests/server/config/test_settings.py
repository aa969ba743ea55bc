"""The table of settings is the only place they are written; whatever shows them is made from it."""

import argparse
import inspect
import re

import pytest
from slotcache.server.config.flags import FOREIGN, add_arguments, notes_of, settings_of, with_dashes
from slotcache.server.config.settings import SETTINGS, TENSOR
from slotcache.slots.scheduler import Scheduler


def parsed(*arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return parser.parse_args(with_dashes(arguments))


def parse(*arguments):
    return settings_of(parsed(*arguments))


def test_every_flag_is_parsed_into_its_kind():
    for setting in SETTINGS:
        assert getattr(parse(), setting.name) == setting.default
    chosen = parse("-c", "4096", "-fa", "off", "--cache-prompt", "-np", "2", "--order-hint", "off")
    assert (chosen.ctx_size, chosen.flash_attn, chosen.cache_prompt, chosen.parallel) == (4096, "off", True, 2)
    assert chosen.order_hint is False


def test_a_scheduler_and_the_settings_have_the_same_defaults():
    shape = inspect.signature(Scheduler).parameters
    usual = parse()
    assert shape["window"].default == usual.window
    assert shape["similarity"].default == usual.slot_prompt_similarity
    assert shape["prefill_budget"].default == usual.prefill_budget


def test_the_environment_is_read_and_the_command_line_wins(monkeypatch):
    monkeypatch.setenv("SLOTCACHE_PORT", "9000")
    monkeypatch.setenv("SLOTCACHE_CACHE_PROMPT", "on")
    assert parse().port == 9000 and parse().cache_prompt is True
    assert parse("--port", "9001", "--cache-prompt", "off").port == 9001


@pytest.mark.parametrize(
    "arguments",
    [("--port", "x"), ("-fa", "maybe"), ("--cache-prompt", "perhaps"), ("--por", "1"), ("-np", "0"), ("-np", "300")],
)
def test_a_wrong_value_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        parse(*arguments)
    assert refused.value.code == 2 and arguments[1] in capsys.readouterr().err


def test_a_wrong_environment_is_refused(monkeypatch):
    monkeypatch.setenv("SLOTCACHE_PORT", "many")
    with pytest.raises(SystemExit, match="SLOTCACHE_PORT"):
        parse()


def test_llama_server_s_command_line_starts_this_server():
    words = "--jinja -ngl auto -t -1 -np -1 -ctk F16 -ctv Q8_0 -fa ON -nr --no-cache-prompt --metrics --slots -c 0 -cb"
    chosen = parse(*words.split(), "--hf_file", "a.gguf", "--log-jsonl", "--threads-http", "4")
    assert chosen == parse("-ctv", "q8_0", "-fa", "on", "--repack", "off", "--hf-file", "a.gguf", "--log-format", "json")
    assert [parse("-ngl", number).gpu_layers for number in ("7", "auto", "all")] == [7, -1, -2]
    assert parse("--no-slots").slots is False
    chosen = [parse(*flags).repack for flags in ([], ["--repack"], ["--repack", "--no-repack"], ["--repack", "yes"])]
    assert chosen == ["auto", "on", "off", "on"]
    assert parse("-fa").flash_attn == "on" and parse("-fa", "false").flash_attn == "off"


def test_llama_server_s_flags_for_cards_and_positions_start_this_server():
    words = "-dev CUDA0,CUDA1 -sm row -ts 3,1 -mg 1 --rope-scaling YARN --rope-scale 4 --yarn-orig-ctx 32768"
    chosen = parse(
        *words.split(), "--override-kv", "a=int:1,b=int:2", "--override-kv", "c=bool:true", "--yarn-ext-factor", "-1.0"
    )
    assert (chosen.device, chosen.split_mode, chosen.tensor_split, chosen.main_gpu) == ("CUDA0,CUDA1", "row", "3,1", 1)
    assert (chosen.rope_scaling, chosen.rope_scale, chosen.yarn_orig_ctx) == ("yarn", 4.0, 32768)
    assert chosen.override_kv == "a=int:1,b=int:2,c=bool:true" and chosen.yarn_ext_factor == -1.0


def test_a_split_of_tensors_is_refused_with_its_reason(capsys):
    with pytest.raises(SystemExit) as refused:
        parse("-sm", "tensor")
    assert refused.value.code == 2 and TENSOR in capsys.readouterr().err


def test_ollama_s_port_is_a_word():
    assert parse("--ollama").port == 11434 and parse("--ollama", "--port", "9").port == 9


def test_a_flag_without_effect_is_noted():
    notes = notes_of(parsed("--mlock", "--numa", "distribute", "--jinja", "--warmup"))
    assert [note.split()[0] for note in notes] == ["--mlock", "--numa"] and all("no effect: " in note for note in notes)


@pytest.mark.parametrize(
    "foreign", [foreign for foreign in FOREIGN if foreign.refused], ids=lambda foreign: foreign.flags[0]
)
def test_a_flag_that_would_change_answers_is_refused_with_a_line(foreign, capsys):
    with pytest.raises(SystemExit) as refused:
        parse(foreign.flags[-1], *["1"] * foreign.num_values)
    error = capsys.readouterr().err
    assert refused.value.code == 2 and foreign.flags[-1] in error and foreign.says in error and len(error.splitlines()) == 1


def test_llama_server_s_environment_is_read_and_ours_wins(monkeypatch):
    for name, value in {
        "LLAMA_ARG_CTX_SIZE": "4096",
        "LLAMA_ARG_N_PARALLEL": "-1",
        "LLAMA_ARG_CACHE_PROMPT": "enabled",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LLAMA_API_KEY", "a,b")
    chosen = parse()
    assert (chosen.ctx_size, chosen.parallel, chosen.cache_prompt, chosen.api_key) == (4096, 4, True, "a,b")
    monkeypatch.setenv("SLOTCACHE_CTX_SIZE", "512")
    assert parse().ctx_size == 512 and parse("-c", "256").ctx_size == 256


def test_variables_that_are_not_heeded_are_noted(monkeypatch):
    for name in ("LLAMA_ARG_MMPROJ", "LLAMA_ARG_NOTHING_KNOWN", "LLAMA_ARG_JINJA", "LLAMA_ARG_PORT"):
        monkeypatch.setenv(name, "1")
    assert [note.split()[0] for note in notes_of(parsed())] == ["LLAMA_ARG_MMPROJ", "LLAMA_ARG_NOTHING_KNOWN"]


def test_a_variable_that_turns_off_what_stays_on_is_noted_like_the_flag(monkeypatch):
    for variable, flag in (("LLAMA_ARG_KV_OFFLOAD", "--no-kv-offload"), ("LLAMA_ARG_MMAP", "--no-mmap")):
        (of_flag,) = notes_of(parsed(flag))
        for value, expected in (("0", [of_flag.replace(flag, variable)]), ("1", []), ("odd", [])):
            monkeypatch.setenv(variable, value)
            assert notes_of(parsed()) == expected


def test_flags_and_variables_have_one_meaning_each():
    ours = [flag for setting in SETTINGS for flag in (*setting.flags, *setting.fixed)]
    flags = ours + [flag for foreign in FOREIGN for flag in foreign.flags]
    assert len(flags) == len(set(flags))
    variables = [name for setting in SETTINGS for name in setting.variables]
    variables += [foreign.variable for foreign in FOREIGN if foreign.variable]
    assert len(variables) == len(set(variables))
    assert all(re.fullmatch("--?[a-z0-9][a-zA-Z0-9.-]*|-C[a-z]*", flag) for flag in flags)
