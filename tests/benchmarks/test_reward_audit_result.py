"""The result of `benchmarks/reward_audit.py` has the families of this run, or names the others."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import reward_audit


@pytest.mark.parametrize("keep", [False, True])
def test_rows_of_earlier_runs_stay_only_if_asked_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    monkeypatch.setattr(reward_audit, "audit_reward", lambda *_, **__: None)
    monkeypatch.setattr(reward_audit, "row", lambda *_: dict.fromkeys(reward_audit.WAYS, "A"))
    out = tmp_path / "audit.json"
    command = ["reward_audit.py", "--out", str(out), "--families"]
    monkeypatch.setattr(sys, "argv", [*command, "chain_sum", "countdown"])
    reward_audit.main()
    monkeypatch.setattr(sys, "argv", [*command, "countdown", *(["--keep"] if keep else [])])
    reward_audit.main()
    result = json.loads(out.read_text())
    assert set(result["families"]) == ({"chain_sum", "countdown"} if keep else {"countdown"})
    assert result["about"].endswith("measured these families: chain_sum.") is keep
    assert "--families countdown" in result["command"]
