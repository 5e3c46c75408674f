"""The report file: self-contained, bounded in size, and safe against hostile model output."""

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perilune.cli.main import app
from perilune.errors import RequestError
from perilune.ui.collect import collect_report
from perilune.ui.headline import Headline
from perilune.ui.report import build_report, render_report
from perilune.ui.view import ExperimentView

HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>\u2028"


@pytest.fixture(scope="module")
def page(experiment: ExperimentView, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("report") / "deep" / "report.html"
    return build_report(experiment, out).read_text(encoding="utf-8")


def test_report_is_one_self_contained_file_below_8_mb(page: str) -> None:
    assert len(page.encode()) < 8_000_000
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:|//)|@import|url\(""", page)
    assert "default-src 'none'" in page


def test_content_security_policy_lists_hashes_of_scripts_and_style(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "unsafe" not in policy[1]
    bodies = re.findall(r"<script(?: type=module)?>(.*?)</script>", page, re.DOTALL) + re.findall(
        r"<style>(.*?)</style>", page, re.DOTALL
    )
    assert len(bodies) == 16
    for body in bodies:
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]


def test_hostile_text_stays_inside_json_block(experiment: ExperimentView) -> None:
    data = collect_report(experiment)
    page = render_report(
        replace(data, headline=Headline(HOSTILE, (HOSTILE,)), experiment={**data.experiment, "name": HOSTILE})
    )
    assert "window.broken = 1</script>" not in page
    assert "<img" not in page
    block = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    assert block is not None
    assert json.loads(block[1])["headline"]["title"] == HOSTILE


def test_nan_values_become_null(experiment: ExperimentView) -> None:
    data = collect_report(experiment)
    first = replace(data.evaluations[0], mean_length=float("nan"))
    page = render_report(replace(data, evaluations=[first]))
    assert '"mean_length":null' in page
    assert "NaN" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def test_report_is_deterministic(experiment: ExperimentView, page: str) -> None:
    again = render_report(collect_report(experiment))
    assert re.sub(r"Written by[^.]*\.[^.]*\.[^.]*\.", "", again) == re.sub(
        r"Written by[^.]*\.[^.]*\.[^.]*\.", "", page
    )


def test_unwritable_report_path_raises_request_error(experiment: ExperimentView, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError):
        build_report(experiment, tmp_path / "file" / "report.html")


def test_report_command_writes_the_report_of_a_folder(experiment: ExperimentView, tmp_path: Path) -> None:
    home = experiment.stages[0].attempt_dir.parents[3]  # type: ignore[union-attr]
    out = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", str(home), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "pass@1 rose from" in out.read_text()


def test_report_command_refuses_unknown_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["report", "nothing"])
    assert isinstance(result.exception, RequestError)
    assert not (tmp_path / "report.html").exists()


VENDORED = {  # SHA-256 of the files of Preact 10.29.8, htm 3.1.1 and uPlot 1.6.32 on npm
    "hooks.umd.js": "5c29238e5dc99df306d7f7fff038591a397cfcfabb59f81fbdef43d670aa0566",
    "htm.LICENSE": "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f",
    "htm.umd.js": "7a31776e04bd4afde0d4308177d26f377716fcf7e4bd70be590746d6aa594f08",
    "preact.LICENSE": "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4",
    "preact.umd.js": "134b77bc803fa38661dc1b1e44e96eb0bb6a1a00edbb96d34dcde421b2e80b06",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def test_front_end_assets_stay_small() -> None:
    folder = files("perilune.ui") / "assets"
    own = [file.read_bytes() for file in folder.iterdir() if file.is_file()]
    assert len(own) > 10
    assert sum(map(len, own)) < 156_000
    vendored = [(folder / "vendor" / name).read_bytes() for name in VENDORED]
    assert sum(map(len, vendored)) < 150_000
    assert sum(len(gzip.compress(asset)) for asset in [*own, *vendored]) < 93_000


def test_no_script_of_ours_parses_html_or_text_as_code() -> None:
    folder = files("perilune.ui") / "assets"
    scripts = [file for file in folder.iterdir() if file.name.endswith(".js")]
    assert len(scripts) > 10
    html = r"dangerouslySetInnerHTML|(?:inner|outer)HTML|insertAdjacentHTML|srcdoc|document\.write|DOMParser"
    ways = rf"{html}|\beval\(|new Function"
    assert [file.name for file in scripts if re.search(ways, file.read_text(encoding="utf-8"))] == []


def test_vendored_files_have_the_digests_of_their_release(page: str) -> None:
    folder = files("perilune.ui") / "assets" / "vendor"
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    assert found == VENDORED
    for name in ("preact", "htm", "uPlot"):  # the report is a copy, so it has the notices, too
        assert (folder / f"{name}.LICENSE").read_text() in page
