"""Loading of valid recipes, and the error for each kind of invalid recipe."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.bundle.plugin import load_plugin as plugin
from perilune.errors import RequestError
from perilune.recipe.load import bundled_recipe, bundled_recipes, load_recipe
from perilune.recipe.resolve import resolve
from perilune.recipe.schema import Recipe, build_job
from perilune.recipe.source import MAX_BYTES, parse_yaml

pytestmark = pytest.mark.usefixtures("tasks")

DINNER = """\
name: dinner
seed: 3
model: {preset: tiny}
environment: {id: kitchen}
stages:
  - {name: cake, task: bake, flour: bread, eggs: egg}
  - {name: egg, task: lay}
  - name: bread
    task: bake
    flour: model
    heat: 1e-1
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "dinner.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def dinner(write) -> Path:
    return write(DINNER)


def test_stages_are_sorted_after_their_inputs(dinner: Path) -> None:
    recipe = load_recipe(dinner)
    assert [stage.name for stage in recipe.stages] == ["egg", "bread", "cake"]
    assert recipe.stage("cake").consumes == {"flour": "bread", "eggs": "egg"}
    assert recipe.stage("bread").consumes == {"flour": "model"}


def test_load_recipe_fills_in_every_default(dinner: Path) -> None:
    recipe = load_recipe(dinner)
    assert recipe.stage("bread").spec == {
        "flour": "model", "eggs": None, "minutes": 30, "heat": 0.1, "style": "plain", "tags": [],
    }  # fmt: skip
    assert recipe.environment == {
        "id": "kitchen", "meal": "lunch", "guests": 2,
        "episodes": {
            "max_turns": None, "max_tokens": None, "seconds": 10.0, "on_failure": "drop", "max_failures": 0.5,
        },
        "prompting": None,
        "context": None,
    }  # fmt: skip
    assert recipe.resources.threads == 0


def test_job_contains_only_its_own_stage(dinner: Path) -> None:
    recipe = load_recipe(dinner)
    job = build_job(recipe, recipe.stage("egg"))
    assert (job.task, job.stage, job.seed, job.inputs) == ("lay", "egg", 3, ())
    assert job.spec == {"hen": "brown", "after": None}
    assert job.model["preset"] == "tiny"
    assert job.environment == recipe.environment


def test_load_recipe_is_deterministic_and_round_trips(dinner: Path) -> None:
    recipe = load_recipe(dinner)
    assert recipe == load_recipe(dinner)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("seed=7", lambda r: r.seed, 7),
        ("bread.minutes=5", lambda r: r.stage("bread").spec["minutes"], 5),
        ("stages.bread.minutes=5", lambda r: r.stage("bread").spec["minutes"], 5),
        ("bread.heat=1e-2", lambda r: r.stage("bread").spec["heat"], 0.01),
        ("bread.tags=[a, yes]", lambda r: r.stage("bread").spec["tags"], ["a", "yes"]),
        ("cake.eggs=null", lambda r: r.stage("cake").consumes, {"flour": "bread"}),
        ("resources.device=cpu", lambda r: r.resources.device, "cpu"),
        ("resources.threads=1", lambda r: r.resources.threads, 1),
        ("environment={id: kitchen, meal: dinner}", lambda r: r.environment["meal"], "dinner"),
    ],
)
def test_override_replaces_one_key_with_a_typed_value(
    dinner: Path, override: str, read, value: object
) -> None:
    assert read(load_recipe(dinner, [override])) == value


def test_model_path_resolves_beside_the_recipe_or_in_the_hub_cache(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "hub" / "models--org--small" / "snapshots" / "0a1b"
    for folder in (tmp_path / "here", tmp_path / "else" / "here", cached):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (tmp_path / "hub" / "models--org--small" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--small" / "refs" / "main").write_text("0a1b")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path / "else")

    recipe = write(DINNER.replace("{preset: tiny}", "{path: here, chat_template: chat.jinja}"))
    assert load_recipe(recipe).model.path == str(tmp_path / "here")
    assert load_recipe(recipe).model.chat_template == "{{ messages }}"
    assert load_recipe(recipe, ["model.path=here"]).model.path == str(tmp_path / "else" / "here")
    assert load_recipe(recipe, ["model.path=org/small"]).model.path == str(cached)


def test_schema_lists_all_model_presets() -> None:
    from perilune.models.config.decoder_config import PRESETS
    from perilune.recipe.schema import ModelSpec

    known = ModelSpec.model_json_schema()["properties"]["preset"]["anyOf"][0]
    assert set(known.get("enum", [known.get("const")])) == set(PRESETS)


def test_asynchronous_training_sets_off_policy_correction_by_default() -> None:
    changes = ["rl.asynchronous={staleness: 2}", "rl.lora={targets: [q_proj]}"]
    rl = load_recipe(bundled_recipe("quickstart"), changes).stage("rl")
    assert (rl.spec["off_policy"]["weight"], rl.spec["off_policy"]["max_staleness"]) == ("truncate", 12)
    own = load_recipe(
        bundled_recipe("quickstart"), [*changes, "rl.off_policy={proximal: learner, weight: mask}"]
    )
    assert own.stage("rl").spec["off_policy"]["weight"] == "mask"


def test_last_override_wins(dinner: Path) -> None:
    assert load_recipe(dinner, ["seed=1", "seed=2"]).seed == 2


BAD = {  # (old text, new text): place, parts of the message
    ("seed: 3", "seed: 3\nseeds: 4"): (":3:", "seeds is not a known key", "'seed'"),
    ("heat: 1e-1", "haet: 0.1"): (":11:", "stages.bread.haet is not a known key", "'heat'"),
    ("heat: 1e-1", "heat: 1.5"): (":11:", "stages.bread.heat is 1.5", "less than or equal to 1"),
    ("heat: 1e-1", "heat: warm"): (":11:", 'stages.bread.heat is "warm"', "valid number"),
    ("heat: 1e-1", "minutes: '5'"): (":11:", 'minutes is "5"', "valid integer", "try: minutes: 5"),
    ("heat: 1e-1", "minutes: 1e1"): (":11:", "minutes is 10.0", "valid integer", "try: minutes: 10"),
    ("heat: 1e-1", "heat: off"): (":11:", 'heat is "off"', "valid number", "try: heat: 0"),
    ("heat: 1e-1", "heat: '1e-1'"): (":11:", 'heat is "1e-1"', "valid number", "try: heat: 0.1"),
    ("heat: 1e-1", "tags: Plain"): (":11:", 'tags is "Plain"', "should be a list", 'try: tags: ["Plain"]'),
    ("heat: 1e-1", "style: FANCY"): (":11:", 'style is "FANCY"', 'try: style: "fancy"'),
    ("model: {preset: tiny}", "model: tiny"): (":3:", "a section of keys", "try: model: {preset: tiny}"),
    ("model: {preset: tiny}", "model:"): (":1:", "model is missing"),
    ("{id: kitchen}", "kitchen"): (":4:", "must be a section", "try: environment: {id: kitchen}"),
    ("seed: 3", "seed:\t3\n\tx: 1"): ("not valid YAML: a tab", "try: indent with spaces"),
    ("heat: 1e-1", "minutes: true"): (":11:", "stages.bread.minutes is true", "valid integer"),
    ("heat: 1e-1", "style: gaudy"): (":11:", 'stages.bread.style is "gaudy"', "'plain' or 'fancy'"),
    ("heat: 1e-1", "heat: .nan"): (":11:", "stages.2.heat", "not a finite number"),
    ("seed: 3", "seed: " + "9" * 33): (":2:", "seed: 999", "... has more than 32 digits"),
    ("seed: 3", "seed: 3\n---"): (":3:", "a second document begins", "try: remove '---'"),
    ("seed: 3", "seed: 3 # \0"): (":2:", "the character '\\x00' is not allowed"),
    ("seed: 3", "s\u0435ed: 3"): (":2:", "U+0435, CYRILLIC SMALL LETTER IE", "'seed'"),
    ("heat: 1e-1", "flour: cake"): (":11:", "stages.2.flour is given twice", "line 10"),
    ("task: lay}", "task: layy}"): (":7:", "no task 'layy'", "'lay'"),
    ("name: egg,", "name: bread,"): (":8:", "two stages have the name 'bread'", ""),
    ("name: egg,", "name: seed,"): (":7:", "'seed' is a key of recipes", ""),
    ("name: egg,", "name: 'e g',"): (":7:", "stages.e g.name", "must begin with a letter", "try: e-g"),
    ("eggs: egg", "eggs: egs"): (":6:", "no stage is named 'egs'", "'egg'"),
    ("eggs: egg", "eggs: bread"): (
        ":6:",
        "needs a stage that makes a dataset, and 'bread' makes a checkpoint",
        "one of: egg",
    ),
    ("eggs: egg", "eggs: model"): (
        ":6:",
        "needs a stage that makes a dataset, and 'model' makes a checkpoint",
        "one of: egg",
    ),
    ("flour: bread", "flour: cake"): (":6:", "cannot consume itself", "one of: model, bread"),
    ("flour: model", "flour: cake"): (":6:", "in a cycle: cake <- bread <- cake", ""),
    ("flour: model", "tags: []"): (":8:", "stages.bread.flour is missing", ""),
    ("{preset: tiny}", "{}"): (":3:", "model: needs exactly one of preset and path", ""),
    ("{preset: tiny}", "{preset: tiny, path: x}"): (
        ":3:",
        "exactly one of preset and path",
        "model.preset=null",
    ),
    ("{preset: tiny}", "{preset: tinny}"): (":3:", "model.preset is", "'tiny'"),
    ("{preset: tiny}", "{path: nowhere}"): (":3:", "model.path: no file or folder /", "no model nowhere"),
    ("{preset: tiny}", "{path: .}"): (":3:", "has no config.json", "Hugging Face format"),
    ("{preset: tiny}", "{preset: tiny, chat_template: x}"): (":3:", "cannot be read", "no file x"),
    ("{id: kitchen}", "{id: kitchn}"): (":4:", "no environment called 'kitchn'", "'kitchen'"),
    ("{id: kitchen}", "{id: kitchen, meal: dinner,\n  guests: 9}"): (
        ":5:",
        "environment.guests: too many",
        "4 at most",
    ),
    ("{id: kitchen}", "{id: kitchen, meal: tea}"): (
        ":4:",
        'environment.meal is "tea"',
        "'lunch' or 'dinner'",
    ),
    ("{id: kitchen}", "{id: kitchen, meel: tea}"): (":4:", "environment.meel is not a known key", "'meal'"),
    ("{id: kitchen}", "{id: kitchen, guests: -1}"): (":4:", "environment.guests is -1", "equal to 0"),
    ("{id: kitchen}", "{}"): (":4:", "environment.id: the id is missing", "kitchen"),
    ("{id: kitchen}", "[]"): (":4:", "environment must be a section", ""),
    ("seed: 3", "seed: -1"): (":2:", "seed is -1", "greater than or equal to 0"),
    ("seed: 3", "seed: *seed"): (":2:", "aliases", ""),
    ("seed: 3", "seed: !!python/object/apply:os.getcwd []"): (":2:", "tag", ""),
    ("seed: 3", "resources: {device: gpu}"): (":2:", "resources.device", "'cpu' or 'cuda'"),
    ("seed: 3", "seed: !!int x"): (":2:", "the tag tag:yaml.org,2002:int is not supported", ""),
    ("seed: 3", "seed: !!null x"): (":2:", "the tag tag:yaml.org,2002:null is not supported", ""),
    ("{id: kitchen}", "{<<: {id: kitchen}}"): (":4:", "merge keys (<<) are not supported", "write the keys"),
    ("seed: 3", 'seed: "\\ud83d"'): (":2:", "'\\ud83d' is no character", "write UTF-8"),
    ("seed: 3", '"\\ud83d": 3'): (":2:", "'\\ud83d' is no character", "write UTF-8"),
    ("seed: 3", "seed: " + "[" * 70 + "]" * 70): (":2:", "nested too deeply", ""),
    ("seed: 3", "? [a, b]\n: 3"): (":2:", "a key must be text", ""),
    ("seed: 3", "seed: {"): (":4:", "not valid YAML", ""),
    ("seed: 3", "rewards: {short: {funtion: 'a.py:f'}}"): (
        ":2:",
        "rewards.short.funtion is not a known",
        "'function'",
    ),
    ("seed: 3", "rewards: {short: {function: 'a.py:f', weight: much}}"): (
        ":2:",
        'rewards.short.weight is "much"',
        "valid number",
    ),
    ("seed: 3", "rewards: {short: 'a.py:f'}"): (
        ":2:",
        'rewards.short is "a.py:f"',
        "valid number",
        "try: short: {function: a.py:f}",
    ),
    ("seed: 3", "resources: {sharded: true}"): (
        ":2:",
        "resources: sharded needs more than one process",
        "set processes or nodes",
    ),
    ("seed: 3", "resources: {threads: 100000000000}"): (":2:", "less than or equal to 4096", ""),
    ("seed: 3", "resources: 2"): (":2:", "resources is 2 but should be a section of keys", ""),
    ("seed: 3", "learning_rate: 1"): (
        ":2:",
        "learning_rate is not a known key",
        "'lr', which belongs in another",
    ),
    ("stages:", "stagse:"): (":5:", "stagse is not a known key", "'stages'"),
    ("name: dinner\n", ""): (":1:", "name is missing", ""),
    (DINNER[DINNER.index("stages") :], "stages: []"): (":5:", "stages", "is empty"),
    (DINNER[DINNER.index("stages") :], "stages: cake"): (":5:", "stages must be a list", ""),
    (DINNER[DINNER.index("stages") :], "stages: [cake]"): (":5:", "a stage is a mapping", ""),
    (DINNER, "- a\n"): (":1:", "a recipe is a mapping", ""),
    (DINNER, ""): ("dinner.yaml:", "a recipe is a mapping", ""),
    (DINNER, "a: " + "[" * 5000): ("dinner.yaml:", "nested too deeply", ""),
    (DINNER, "# " + "x" * MAX_BYTES): ("dinner.yaml:", "larger than", ""),
}


@pytest.mark.parametrize("change", BAD, ids=lambda change: change[1][:30])
def test_invalid_recipe_error_names_line_problem_and_remedy(write, change: tuple[str, str]) -> None:
    old, new = change
    assert DINNER.count(old) == 1
    with pytest.raises(RequestError) as caught:
        load_recipe(write(DINNER.replace(old, new)))
    where, *parts = BAD[change]
    message = str(caught.value)
    assert where in message.splitlines()[0]
    for part in parts:
        assert part in message


@pytest.mark.parametrize("override", ["name=\udcff", "bread.\udcff=1"])
def test_override_that_is_not_utf8_is_refused(dinner: Path, override: str) -> None:
    with pytest.raises(RequestError) as caught:
        load_recipe(dinner, [override])
    assert str(caught.value).startswith("--set ") and r"\udcff" in caught.value.what
    assert str(caught.value).isascii()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sead=1", "no key or stage 'sead'"),
        ("bred.heat=1", "no key or stage 'bred'"),
        ("stages.bred.heat=1", "'bread'"),
        ("bread.haet=1", "'heat'"),
        ("bread.heat=2", "stages.bread.heat is 2"),
        ("bread.heat=[", "not valid YAML"),
        ("bread=2", "bread is a stage; set one of its keys, such as bread.heat"),
        ("bread", "KEY=VALUE"),
        ("=1", "KEY=VALUE"),
        ("seed.x=1", "seed is 5, not a section"),
        ("bread.heat.x=1", "bread.heat is 0.1, not a section"),
        ("BREAD.heat=1", "try: 'bread'"),
        ("stages.bread.tags.0=x", "tags.0"),
        ("cake.flour=egg", "'egg' makes a dataset"),
        ("bread." + "a." * 1000 + "a=1", "nested too deeply"),
        ("bre\u0430d.heat=1", "U+0430, CYRILLIC SMALL LETTER A"),
    ],
)
def test_invalid_override_is_named(dinner: Path, override: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        load_recipe(dinner, ["seed=5", override])
    assert str(caught.value).startswith(f"--set {override}: ")
    assert said in str(caught.value)


def test_errors_in_overrides_are_listed_without_those_in_the_file(write) -> None:
    recipe = write(DINNER + "sead: 1\n")
    for keys in (["haet"], ["haet", "tiem"]):
        with pytest.raises(RequestError) as caught:
            load_recipe(recipe, [f"bread.{key}=1" for key in keys])
        listed = [caught.value, *caught.value.others]
        assert [error.what for error in listed] == [f"stages.bread.{key} is not a known key" for key in keys]


def test_all_errors_of_a_recipe_are_listed_and_many_are_counted(write) -> None:
    wrong = "".join(f"key{number}: 1\n" for number in range(9))
    with pytest.raises(RequestError) as caught:
        load_recipe(write(DINNER + wrong))
    first, *lines = [line for line in str(caught.value).splitlines() if not line.startswith("  try: ")]
    assert "key0 is not a known key" in first
    assert len(lines) == 7 and lines[-1] == "also: 2 further errors"
    for number, line in enumerate(lines[:-1], 1):
        assert line.startswith("also: ") and f"key{number} is not a known key" in line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sft.forgetting=off", 'is "off" but should be a section of keys or false\n  try: forgetting: false'),
        ("sft.forgetting=true", "is true but should be a section of keys or false\n  try: forgetting: {}"),
        ("sft.keep={optimizer: yes}", 'is "yes" but should be true or false\n  try: optimizer: true'),
        ("rl.algorithm={name: grpo, dual_clip: no}", "try: dual_clip: null"),
        (
            "rl.algorithm={clip_low: 0.3}",
            "algorithm.name is missing\n  try: one of: grpo, dr_grpo,",
        ),
        ("rl.algorithm.clip_low=0.3", "try: --set 'rl.algorithm={name: grpo, clip_low: 0.3}'"),
        (
            "environment.prompting={few_shot: [{question: a}]}",
            "few_shot.0.answer is missing\n  try: set it: ",
        ),
        ("environment.max_digits=2", "try: config: {max_digits: ...}, if it is a setting of the task;"),
        ("environment.config.max_terms=two", "'max_terms' is 'two' but should be a number"),
        ("rl.checkpoint=after_sft", "'after_sft' makes an evaluation"),
        ("rl.verifier_weight=1", "verifier_weight needs reward_model"),
    ],
)
def test_error_suggests_the_value_that_the_user_means(override: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        load_recipe("quickstart", [override])
    assert said in str(caught.value)


def test_error_shows_all_problems_in_the_order_of_lines(write) -> None:
    text = DINNER.replace("seed: 3", "seed: -1").replace("heat: 1e-1", "heat: 3").replace("kitchen", "kitch")
    with pytest.raises(RequestError) as caught:
        load_recipe(write(text))
    places = [line for line in str(caught.value).splitlines() if "dinner.yaml" in line]
    assert [line.rpartition("dinner.yaml:")[2].split(" ")[0] for line in places] == ["2:", "4:", "11:"]
    assert "seed is -1 but should be greater" in places[0]


def test_missing_recipe_error_lists_bundled_recipes(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such recipe") as caught:
        load_recipe(tmp_path / "none.yaml")
    assert all(name in str(caught.value) for name in bundled_recipes())
    with pytest.raises(RequestError, match="a folder"):
        load_recipe(tmp_path)


def test_invalid_utf8_error_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "dinner.yaml"
    path.write_bytes(b"name: dinner\nseed: \xff\n")
    with pytest.raises(RequestError, match=r"dinner.yaml:2: not UTF-8"):
        load_recipe(path)


scalars = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


PLACES = [("seed",), ("model",), ("environment", "meal"), ("stages",), ("stages", 2, "heat")]


@settings(deadline=None)  # a busy machine has pauses
@given(path=st.sampled_from(PLACES), value=values)
def test_resolve_of_any_value_gives_a_recipe_or_a_request_error(
    path: tuple[str | int, ...], value: object
) -> None:
    document = parse_yaml(DINNER, "dinner.yaml")
    section = document.value
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    try:
        recipe = resolve(document, Path())
    except RequestError as error:
        assert error.where.startswith("dinner.yaml:")
    else:
        assert sorted(stage.name for stage in recipe.stages) == ["bread", "cake", "egg"]


@given(st.text(max_size=60))
def test_parse_yaml_of_any_text_gives_a_document_or_a_request_error(text: str) -> None:
    try:
        parse_yaml(text, "x")
    except RequestError as error:
        assert error.where.startswith("x")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"), ("no", "no"), ("true", True), ("1e-3", 0.001), ("20_000", 20000), ("-3", -3),
        ("007", "007"), ("2024-01-01", "2024-01-01"), ("1:30", "1:30"), ("~", None), ("", None),
        ("'3'", "3"), ("3.", 3.0), (".5", 0.5), ("-", [None]), ("null", None), ("1.5.2", "1.5.2"),
    ],
)  # fmt: skip
def test_parse_yaml_reads_scalars_as_json_does(text: str, value: object) -> None:
    read = parse_yaml(f"- {text}", "x").value[0] if text != "-" else parse_yaml("-", "x").value
    assert read == value
    assert type(read) is type(value)


def test_load_recipe_imports_no_heavy_packages() -> None:
    code = (
        "import sys; from perilune.recipe.load import bundled_recipe, bundled_recipes, load_recipe\n"
        "for name in bundled_recipes(): '/' in name or load_recipe(bundled_recipe(name))\n"
        "print([m for m in ('torch', 'pyarrow', 'sqlalchemy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("override", "problem"),
    [("sft.lr=inf", 'is "inf" but should be a valid number'), ("secrets=''", 'secrets is ""')],
)
def test_error_suggests_no_invalid_value(override: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        load_recipe("quickstart", [override])
    assert not caught.value.remedy


def test_learning_rate_above_10_is_refused() -> None:
    with pytest.raises(RequestError, match="should be less than or equal to 10"):
        load_recipe("quickstart", ["rl.lr=1e300"])


def test_work_for_a_stage_does_not_grow_with_their_number(write, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        "perilune.recipe.resolve.load_plugin", lambda name: calls.append(name) or plugin(name)
    )
    head, counts = "name: many\nmodel: {preset: tiny}\nenvironment: {id: calculator}\nstages:\n", []
    for number in (10, 100):
        calls.clear()
        stages = (f"- {{name: s{n}, task: collect, teacher: gold, traces: 4}}\n" for n in range(number))
        load_recipe(write(head + "".join(stages)))
        counts.append(len(calls) / number)
    assert counts[1] == pytest.approx(counts[0], rel=0.2)
