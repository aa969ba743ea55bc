"""The table of settings is the only place they are written; whatever shows them is made from it."""

import argparse
from pathlib import Path

import pytest
from slotcache.server.settings import SETTINGS, Settings, add_arguments, as_markdown

PAGE = Path(__file__).parents[2] / "docs/settings.md"


def parse(*arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return Settings.of(parser.parse_args(arguments))


def test_the_documentation_has_the_table():
    assert as_markdown() in PAGE.read_text()


def test_every_flag_is_parsed_into_its_kind():
    for setting in SETTINGS:
        assert getattr(parse(), setting.name) == setting.default
    chosen = parse("-c", "4096", "-fa", "off", "--cache-prompt", "-np", "2", "--order-hint", "off")
    assert (chosen.ctx_size, chosen.flash_attn, chosen.cache_prompt, chosen.parallel) == (4096, "off", True, 2)
    assert chosen.order_hint is False


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
