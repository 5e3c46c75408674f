"""The reference page of models lists exactly the families that the decoder computes."""

import re
from pathlib import Path

from perilune.models.config.families import DECODER_FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"


def test_models_page_lists_every_decoder_family() -> None:
    table = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"^\| [^|]+ \| `(\w+)` \|", table, re.MULTILINE)) == {
        "model_type",
        *DECODER_FAMILIES,
    }
