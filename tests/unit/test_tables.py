"""The tables of the command line are readable with any content."""

import pytest
from rich.console import Console

from app.fleet.cli import terminal

COLUMNS = ("ID", "ACTION", "ERROR")
ERROR = "the harbour office answered with a page of its own " * 20


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    monkeypatch.setattr(terminal, "out", Console(highlight=False, width=80))
    return capsys


def test_a_long_error_is_truncated_and_the_other_columns_keep_their_width(shown: pytest.CaptureFixture[str]) -> None:
    terminal.write_table(COLUMNS, [("111", "deliver-alert", ""), ("112", "watch-filings", ERROR)])
    header, first, second = (line.split() for line in shown.readouterr().out.splitlines())
    assert header == list(COLUMNS)
    assert first == ["111", "deliver-alert"]
    assert second[:4] == ["112", "watch-filings", "the", "harbour"]
    assert second[-1].endswith("…")


def test_a_value_that_is_wider_than_the_terminal_is_wrapped(shown: pytest.CaptureFixture[str]) -> None:
    terminal.write_table(COLUMNS, [("111", "x" * 100, "")])
    assert shown.readouterr().out.count("x") == 100
