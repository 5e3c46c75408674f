"""Templates: errors name the line, and only allowed keys can be overridden."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from drill_cases import Command, begin, drill_job, drill_plan
from pydantic import BaseModel

from perilune.bundle.freeze import freeze
from perilune.control.machines.lifecycle import Fleet
from perilune.control.record.home import Home
from perilune.control.record.store import Run, move_run
from perilune.control.record.transitions import RunState
from perilune.control.runs.experiments import Control, plan_stages
from perilune.control.runs.placements import Placements
from perilune.control.runs.planner import RetryPolicy
from perilune.control.runs.requests import retry_run
from perilune.control.runs.submission import Submission, submit_stage
from perilune.control.runs.templates import (
    SshTarget,
    Template,
    load_template,
    recorded_template,
    refresh_host_key,
)
from perilune.errors import RequestError
from perilune.execution.verdict import Cause
from perilune.recipe.load import load_recipe

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "template.md"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home.open(tmp_path / "home")
    (home.root / "templates").mkdir()
    return home


def write(home: Home, text: str, name: str = "box") -> None:
    (home.root / "templates" / f"{name}.yaml").write_text(text)


DOCKER = f"launcher:\n  name: docker\n  image: docker.io/library/python@sha256:{'0' * 64}\n"
RENTED = "{name: rented, provider: p, kind: k, lease: {max_lifetime: 60, max_cost: 1}}"
SSH = "placement:\n  name: ssh\n  host: box\n"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (SSH + "  prot: 1\n", 4, "placement.prot is not a known key"),
        (SSH + "  host_key: no key\n", 4, "placement.host_key"),
        ("placement:\n  name: ssh\n  host: -oProxyCommand=id\n", 3, "placement.host"),
        ("placement:\n  name: moon\n", 1, "no placement 'moon'"),
        ("limits:\n  on_box_stop_after: 100\n  lost_after: 100\n", 1, "lost_after must be at least 170"),
        (
            "description: x\nlimits: {max_lifetime: 25}\n",
            2,
            "the key limits is for other machines",
        ),
        ("description: x\nbring: all\n", 2, "the key bring is for other machines"),
        ("description: x\npriority: 3\n", 2, "the template has no slots"),
        (SSH + "limits: {max_lifetime: 1.0e+12}\n", 4, "limits.max_lifetime"),
        (SSH + "  site:\n    environment:\n      HF_TOKEN: x\n", 5, "HF_TOKEN looks like a credential"),
        ("retry: {user: -1}\n", 1, "retry.user is -1"),
        ("placement: [\n", 2, "not valid YAML"),
        ("launcher: {name: moon}\n", 1, "no launcher 'moon'"),
        ("launcher:\n  name: docker\n  image: python:3.12\n", 3, "does not identify the image"),
        (DOCKER + "  mounts: ['/a,target=/etc']\n", 4, "launcher.mounts"),
        (DOCKER + "  gpus: [0, 1]\n  mounts: [/data]\n  networks: none\n", 6, "is not a known key"),
        ("placement:\n  name: local\n  site: {}\n", 1, "placement.site is only for containers"),
    ],
)
def test_template_errors_name_the_line(home: Home, text: str, line: int, what: str) -> None:
    write(home, text)
    with pytest.raises(RequestError) as wrong:
        load_template(home, "box")
    assert what in wrong.value.what
    assert wrong.value.where.endswith(f"box.yaml:{line}")


def test_only_allowed_overrides_are_accepted(home: Home) -> None:
    write(home, SSH + "allowed_overrides: [limits.max_lifetime, resources.threads]\n")
    changed = load_template(home, "box", ["limits.max_lifetime=60", "resources.threads=3"])
    assert (changed.limits.max_lifetime, changed.resources.threads) == (60.0, 3)
    with pytest.raises(RequestError, match=r"does not allow changing 'placement\.host'") as refused:
        load_template(home, "box", ["placement.host=other"])
    assert refused.value.remedy == "it allows limits.max_lifetime, resources.threads"
    with pytest.raises(RequestError, match=r"max_lifetime is -1"):
        load_template(home, "box", ["limits.max_lifetime=-1"])
    with pytest.raises(RequestError, match="key=value"):
        load_template(home, "box", ["limits"])


def test_missing_template_error_names_existing_templates(home: Home) -> None:
    write(home, SSH)
    with pytest.raises(RequestError, match="no template is called 'bok'") as missing:
        load_template(home, "bok")
    assert "'box'" in missing.value.remedy and "local" in missing.value.remedy


def test_template_resources_override_those_of_the_job() -> None:
    template = Template.model_validate({"resources": {"threads": 7}})
    assert template.apply_resources(drill_job()).resources.threads == 7
    assert template.apply_resources(drill_job()).resources.device == "cpu"
    assert Template().apply_resources(drill_job()) == drill_job()


@pytest.mark.parametrize("where", ["{name: local}", "{name: ssh, host: box}", RENTED])
@pytest.mark.parametrize(("how", "launcher"), [("", "process"), (DOCKER, "docker")])
def test_each_launcher_works_with_each_placement(
    control: Control, home: Home, where: str, how: str, launcher: str
) -> None:
    write(home, f"placement: {where}\n{how}")
    places = Placements(home, Fleet(home, control.store), RetryPolicy())
    template = load_template(home, "box")
    placement = places.build(template)
    assert placement.launcher == launcher
    assert (
        placement.capabilities.is_remote
        == (template.retry_policy().lost_after > 1800)
        == (where + how != "{name: local}")
    )


def test_containers_on_several_machines_need_host_network(home: Home) -> None:
    rented = f"placement: {RENTED}\n"
    write(home, rented + DOCKER + "resources: {nodes: 2}\n")
    job = drill_job().model_copy(update={"task": "gang_drill"})
    with pytest.raises(RequestError, match="separate networks") as apart:
        load_template(home, "box").apply_resources(job)
    assert apart.value.remedy == "network: host"
    write(home, rented + DOCKER + "  network: host\nresources: {nodes: 2}\n")
    assert load_template(home, "box").apply_resources(job).resources.nodes == 2


def test_remote_attempt_is_lost_only_after_it_must_have_stopped(home: Home) -> None:
    assert Template().retry_policy().lost_after == 1800.0
    write(home, SSH + "limits: {on_box_stop_after: 1200}\n")
    assert load_template(home, "box").retry_policy().lost_after == 1270.0
    write(home, SSH + "limits: {on_box_stop_after: 1200, lost_after: 1800}\n")
    assert load_template(home, "box").retry_policy().lost_after == 1800.0


def test_templates_commands(perilune: Command, tmp_path: Path) -> None:
    (tmp_path / "home" / "templates").mkdir()
    (tmp_path / "home" / "templates" / "box.yaml").write_text("description: far\n" + SSH)
    code, out, _ = perilune("templates", "list", "--json")
    assert code == 0
    assert [(template["id"], template["placement"]["name"]) for template in json.loads(out)] == [
        ("box", "ssh"),
        ("local", "local"),
    ]
    assert "far" in perilune("templates", "list")[1]
    assert json.loads(perilune("templates", "show", "box", "--json")[1])["limits"]["max_lifetime"] == 604800
    assert perilune("templates", "validate", "box")[0] == 0
    assert perilune("run", "quickstart", "--template", "nowhere")[0] == 2
    assert "no template is given" in perilune("run", "quickstart", "--with", "a=b")[2]


def test_validate_refuses_unknown_provider_or_kind(perilune: Command, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "templates").mkdir()
    (home / "templates" / "far.yaml").write_text(f"placement: {RENTED}\nlimits: {{on_box_stop_after: 60}}\n")
    assert perilune("templates", "validate", "far")[0] == 0  # there is nothing to check it against
    for name, kind, why in (
        ("q", "k", "no provider is called 'p'"),
        ("p", "j", "no kind 'k'"),
        ("p", "k", ""),
    ):
        ray = {"type": "ray", "kinds": {kind: {"cpus": 1}}}
        (home / "providers.yaml").write_text(json.dumps({"daily_cap": 1, "providers": {name: ray}}))
        code, _, err = perilune("templates", "validate", "far")
        assert (code, why in err) == (2 if why else 0, True), err


def fields(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        inner = sections(field.annotation)
        for kind in inner:
            yield from fields(kind, f"{above}{name}.")
        if not inner:
            yield f"{above}{name}", field


def sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in sections(inner)]


def test_every_key_is_documented() -> None:
    page = PAGE.read_text()
    for key, field in fields(Template):
        if not key.endswith(".name"):
            assert f"| `{key}` |" in page and (field.description or "").partition(";")[0] in page, key


def test_retry_uses_current_host_key_of_template(control: Control) -> None:
    before, now = (f"ssh-ed25519 {letter * 68}" for letter in "AB")
    path = control.home.root / "templates" / "box.yaml"
    path.parent.mkdir()
    path.write_text(f"placement: {{name: ssh, host: box.invalid, port: 2222, host_key: {before}}}\n")
    path.with_name("broken.yaml").write_text("placement: {name: nowhere}\n")
    plan = drill_plan("one", steps=1)
    template = load_template(control.home, "box")
    submission = Submission(begin(control, [plan]), "one", "drill", template=template)
    run = submit_stage(control.home, control.store, submission, partial(freeze, plan.job, {}))
    with control.store.transaction() as session:
        row = session.get_one(Run, run.id)
        move_run(session, row, RunState.FAILED, cause=Cause.HOST_REFUSED.value, message="another host key")
    path.write_text(f"placement: {{name: ssh, host: box.invalid, port: 2222, host_key: {now}}}\nslots: 1\n")
    again = recorded_template(control.home, retry_run(control, run.id).id)
    assert again is not None and isinstance(again.placement, SshTarget)
    assert again.placement.host_key == now and again.slots is None  # everything else is unchanged
    path.write_text(f"placement: {{name: ssh, host: other.invalid, host_key: {before}}}\n")
    assert refresh_host_key(control.home, again) == again


def test_bring_metrics_is_refused_when_later_stage_needs_checkpoint(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: two\nmodel: {preset: tiny}\nenvironment: {id: calculator}\nstages:\n"
        "  - {name: train, task: rl, checkpoint: model, steps: 1}\n"
        "  - {name: after, task: evaluate, checkpoint: train}\n"
    )
    loaded = load_recipe(recipe)
    left = Template.model_validate({"bring": "metrics", "placement": {"name": "ssh", "host": "box"}})
    with pytest.raises(RequestError, match="stage after takes the checkpoint of stage train"):
        plan_stages(loaded, left)
    for template in (left.model_copy(update={"bring": "final"}), Template(bring="metrics")):  # or a local run
        assert len(plan_stages(loaded, template)) == 2


def test_rented_machines_bring_all_by_default() -> None:
    rented = {
        "name": "rented",
        "provider": "fake",
        "kind": "small",
        "lease": {"max_lifetime": 9, "max_cost": 1},
    }
    over_ssh = {"name": "ssh", "host": "box"}
    for placement, given, brings in (
        *((rented, None, "all"), (rented, "final", "final"), (rented, "metrics", "metrics")),
        *((over_ssh, None, "final"), (over_ssh, "all", "all")),
    ):
        document = {"placement": placement} | ({} if given is None else {"bring": given})
        assert Template.model_validate(document).effective_bring == brings
