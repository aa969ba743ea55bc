"""The README: short, in its order, and with the answer that its example really gets. The changes: short, too."""

import re

from slotcache.server.config.settings import SETTINGS

from docs.generated import README, asked_report, with_report
from docs.markdown import read, rows, section

ORDER = [
    "You have a folder of documents",
    "You write a program",
    "You want to know how it works, to compare or to contribute",
    "Questions",
    "Five settings that matter",
    "More",
]
MOST_LINES = 120


def test_it_is_short_and_in_order():
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert re.findall(r"^## (.*)$", text, re.M) == ORDER


def test_its_five_settings_are_as_it_says():
    known = {flag: setting for setting in SETTINGS for flag in setting.flags}
    reported = list(rows(section(read("README.md"), "## Five settings that matter")))
    assert len(reported) == 5
    for flag, default, _ in reported:
        value = known[flag.strip("`")].default
        assert default == (("on" if value else "off") if isinstance(value, bool) else str(value) or "-"), flag


def test_its_two_commands_are_to_serve_and_what_ci_runs():
    above, *_ = read("README.md").partition("\n## ")
    serve, test = re.findall(r"`(make [^`]+)`", above)
    assert serve == "make serve" and read(".ci/run").splitlines()[-1] == test


def test_its_report_is_the_one_that_the_server_sends(demo_server, capsys):
    demo_server.http.delete("/v1/cache")
    page = read("README.md")
    assert with_report(page, asked_report(demo_server.url)) == page, "tests/docs/generated.py writes it anew"


def test_each_release_is_short_for_those_who_upgrade():
    """All that changed is in git: a section has what a user must know."""
    text = read("CHANGELOG.md")
    assert max(map(len, text.splitlines())) <= 140
    newest, *releases = re.split(r"^## ", text, flags=re.M)[1:]
    assert newest.startswith("Unreleased\n") and len(releases) >= 2
    assert all(re.match(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d\n", one) and one.count("\n") <= 40 for one in releases)
