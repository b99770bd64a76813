"""Every SQL statement is in `tests/golden/` as it is sent, so that each change of a statement shows in a review."""

import ast
from pathlib import Path

from app.fleet import sql

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
WRITE = "make golden"


def test_each_statement_equals_its_golden_file() -> None:
    golden = {path.name.removesuffix(".sql"): path.read_text() for path in GOLDEN.glob("*.sql")}
    sent = sql.statements()
    assert golden.keys() == sent.keys(), f"statements came or went; if that is meant: {WRITE}"
    changed = [name for name, text in sent.items() if golden[name] != text]
    assert not changed, f"these statements have changed; if that is meant: {WRITE}"


def test_no_function_builds_a_statement() -> None:
    """Such a statement would have no golden file. Two functions build those of `PAGES` and `IDS`."""
    builders = {
        function.name
        for path in (ROOT / "app" / "fleet").rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Statement"
    }
    assert builders == {"page_sql", "ids_sql"}
