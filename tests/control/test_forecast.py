"""The dry run forecasts stages, files, costs and secrets, and changes nothing."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from cloud_cases import rent_from
from drill_cases import Command
from sqlalchemy import func, select

from perilune.bundle.freeze import freeze
from perilune.control.queries.forecast import forecast_submission
from perilune.control.record.store import Event
from perilune.control.runs.experiments import Control, advance, open_experiment, plan_stages
from perilune.control.runs.progress import StageFinished
from perilune.execution.providers.fake.client import FakeCloud
from perilune.recipe.load import load_recipe

RECIPE = """
name: three
model: {preset: tiny}
environment: {id: calculator}
secrets: [GIVEN, MISSING]
stages:
  - {name: first, task: drill, steps: 1, say: STEPS}
  - {name: second, task: drill, data: first, steps: 1}
  - {name: third, task: drill, data: second, steps: 1}
"""
LEASE = {"max_lifetime": 7200, "max_cost": 1.0}


def state(control: Control) -> tuple[int | None, list[str]]:
    with control.store.snapshot() as session:
        events = session.scalar(select(func.count()).select_from(Event))
    folders = [path for path in control.home.root.rglob("*") if path.is_dir()]
    return events, sorted(str(path) for path in folders)


def test_dry_run_forecasts_stages_and_costs_and_changes_nothing(
    control: Control,
    cloud: FakeCloud,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    perilune: Command,
) -> None:
    monkeypatch.setenv("GIVEN", "the-value-of-it")
    monkeypatch.delenv("MISSING", raising=False)
    monkeypatch.chdir(tmp_path)
    rent_from(control.home.root, cloud.folder, daily_cap=3.0)
    templates = control.home.root / "templates"
    templates.mkdir()
    box = {"placement": {"name": "ssh", "host": "nowhere.invalid"}, "slots": 1}
    box["limits"] = {"on_box_stop_after": 1200}
    rented = {"placement": {"name": "rented", "provider": "fake", "kind": "small", "lease": LEASE}}
    for name, document in (("box", box), ("cloud", rented)):
        (templates / f"{name}.yaml").write_text(yaml.safe_dump(document))
    Path("three.yaml").write_text(RECIPE)
    Path("known.yaml").write_text(RECIPE.replace("secrets: [GIVEN, MISSING]\n", ""))

    done = load_recipe(Path("known.yaml"))
    events = advance(control, open_experiment(control, done), plan_stages(done), poll=0.02)
    finished = next(event for event in events if isinstance(event, StageFinished))
    del events
    before = state(control)

    ahead = forecast_submission(control, plan_stages(done), None)
    first, second, third = ahead.stages
    assert (first.action, first.run_id) == ("reuse", finished.run_id)
    total = control.directory(control.run(finished.run_id)) / "artifacts" / "data" / "total.json"
    assert second.action == "begin" and second.files["data"] == total.stat().st_size
    assert second.files["wheel"] > 1_000_000 > second.files["scripts"] > 10_000
    assert (third.action, third.after) == ("later", ("second",))
    with monkeypatch.context() as patch:
        other_code = "perilune.control.queries.forecast.freeze"
        patch.setattr(other_code, lambda *arguments: freeze(*arguments)[::-1])
        changed = forecast_submission(control, plan_stages(done), None).stages[0]
    assert (changed.action, changed.other_code) == ("begin", finished.run_id)
    assert first.other_code == second.other_code == ""
    assert ahead.cost is None and ahead.secrets == {} and ahead.workspace == ""

    code, out, err = perilune("run", "three.yaml", "--plan", "--template", "cloud", "--json")
    assert code == 0, err
    forecast = json.loads(out)["forecast"]
    (price,) = [offer.price for offer in cloud.offers() if offer.kind == "small"]
    a_machine = min(7200 / 3600 * price, 1.0)
    cost = forecast["cost"]
    assert (cost["per_hour"], cost["attempt"]) == (price, pytest.approx(a_machine))
    assert cost["stages"] == pytest.approx(3 * a_machine)  # secrets change the bundle: no reuse
    assert cost["retried"] == pytest.approx(3 * 11 * a_machine)
    assert (cost["daily_cap"], cost["left"], cost["problem"]) == (3.0, 3.0, "")
    assert forecast["secrets"] == {"GIVEN": "", "MISSING": "not set"}
    assert forecast["limits"]["max_lifetime"] == 7200 and forecast["bring"] == "all"

    # Only the provider is asked, for the price; the output says when it is unreachable.
    shutil.move(cloud.folder / "address.json", tmp_path / "address.json")
    code, text, _ = perilune("run", "three.yaml", "--plan", "--template", "cloud")
    shutil.move(tmp_path / "address.json", cloud.folder / "address.json")
    assert code == 0 and "unknown: " in text and "MISSING: not set" in text
    code, there, _ = perilune("run", "three.yaml", "--plan", "--template", "box")
    assert "those to resume from stay on the machine" in there and ahead.bring == ""
    assert "stops itself when out of contact for 20:00" in there and "lost if unreachable for 21:10" in there
    assert code == 0 and "ssh nowhere.invalid" in there and "0 of 1 slots are taken: starts at once" in there
    assert "the-value-of-it" not in out + text + there
    assert max(map(len, there.splitlines())) <= 100
    assert state(control) == before
