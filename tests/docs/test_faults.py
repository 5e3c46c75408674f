"""Tables of faults and findings name existing tests."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("faults.md", "machines.md", "outside-review.md")


def test_tables_name_existing_tests() -> None:
    written = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"^def (test_\w+)", written, re.MULTILINE))
    for page in PAGES:
        text = (ROOT / "docs" / "explanation" / page).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:`|::)(test_\w+)(?!\w*\.py)", text))
        assert named and not named - tests, f"{page}: {sorted(named - tests)}"


def test_fault_rows_are_numbered() -> None:
    text = (ROOT / "docs" / "explanation" / "faults.md").read_text(encoding="utf-8")
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)] == [*range(1, 33)]
