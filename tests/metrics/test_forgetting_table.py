"""The table and the warnings about forgetting."""

from typing import Any

from perilune.metrics.forgetting import forgetting_rows, forgetting_warnings


def make_report(after: float, low: float, fall: float) -> dict[str, Any]:
    change = {"mean": 0.1, "low": low, "high": 0.2}
    rate = {"mean": 0.5, "low": 0.4, "high": 0.6}
    return {
        "text": {
            "perplexity": {"before": 20.0, "after": after},
            "bits_per_byte": {"before": 1.0, "after": 1.1, "change": change},
        },
        "environments": [
            {
                "environment": "other",
                "tasks": 16,
                "pass@1": {
                    "before": rate,
                    "after": rate,
                    "change": {"mean": -0.2, "low": -0.3, "high": fall},
                },
            }
        ],
        "kl": {"answers": 4, "per_answer": {"mean": 1.5, "low": 1.0, "high": 2.0}, "per_token": 0.25},
    }


def test_significant_perplexity_rise_is_a_warning() -> None:
    (line,) = forgetting_warnings(make_report(23.0, low=0.05, fall=0.1), "kl")
    assert line.startswith("the perplexity of English text rose by 15%, from 20.0 to 23.0")
    assert line.endswith("or set kl")
    assert forgetting_warnings(make_report(21.9, low=0.05, fall=0.1), "kl") == []  # less than a tenth
    assert (
        forgetting_warnings(make_report(23.0, low=-0.05, fall=0.1), "kl") == []
    )  # some passages rose, others fell


def test_significant_fall_in_another_environment_is_a_warning() -> None:
    assert forgetting_warnings(make_report(20.0, low=0.0, fall=-0.1), "kl") == [
        "pass@1 of other fell by 20.0 points"
    ]


def test_every_measure_has_a_row() -> None:
    rows = forgetting_rows(make_report(23.0, low=0.05, fall=0.1))
    assert rows[0] == ("perplexity of English text", "20.00", "23.00", "+15.0%")
    assert rows[1].change == "+0.1000 (+0.0500 to +0.2000)"
    assert rows[2] == (
        "pass@1 of other",
        "50.0% (40.0% to 60.0%)",
        "50.0% (40.0% to 60.0%)",
        "-20.0% (-30.0% to +10.0%)",
    )
    assert [row.after for row in rows[3:]] == ["1.5 (1 to 2)", "0.25"]
    assert forgetting_rows({"skipped": "no room"}) == []
