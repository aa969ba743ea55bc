"""Progress on a terminal and in a log."""

from io import StringIO

from slotcache.bench.report import Progress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_in_ten_steps() -> None:
    out = StringIO()
    with Progress("arm", 25, out) as progress:
        for number in range(25):
            progress.step(f"note {number}")
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["0/25", "10/25", "20/25", "25/25"]
    assert lines[-1].endswith("note 24")


def test_a_terminal_gets_one_line_that_changes() -> None:
    out = Terminal()
    with Progress("arm", 2, out) as progress:
        progress.step("first")
        progress.step("second")
    assert out.getvalue().count("\n") == 1 and out.getvalue().count("\r") == 3
