"""The page of models names what the decoder computes, and nothing else."""

import re
from pathlib import Path

from perilune.models.config.families import DECODER_FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"


def test_every_family_is_on_the_page() -> None:
    table = PAGE.read_text(encoding="utf-8").split("### How close")[0]
    assert set(re.findall(r"^\| [^|]+ \| `(\w+)` \|", table, re.MULTILINE)) == {
        "model_type",
        *DECODER_FAMILIES,
    }
