"""The recipe reference page and JSON schema match the models, and the number of keys stays small."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from perilune.bundle.plugin import load_plugin, plugin_names
from perilune.environments import environment_ids
from perilune.errors import RequestError
from perilune.recipe.aliases import ALIASES
from perilune.recipe.load import bundled_recipe, bundled_recipes, load_recipe
from perilune.recipe.problems import suggest_name
from perilune.recipe.reference import list_sections, recipe_schema, render_markdown

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
STORY = ("collect", "sft", "rl", "evaluate")
ITS_ENVIRONMENT = "environment: reasoning_gym/"
KNOWN = re.compile(r"(recipe|model|resources|stages|environment: .*|task: .*)$")
MOST_NAMES = 77  # names to learn for the main workflow; a name means the same in every task
MOST_MORE = 13  # names that each further task or environment may add


def test_reference_page_and_schema_are_up_to_date() -> None:
    how = "python -m perilune.recipe.reference"
    assert (REFERENCE / "recipe.md").read_text() == render_markdown(), (
        f"{how} markdown > docs/reference/recipe.md"
    )
    schema = json.loads((REFERENCE / "recipe.schema.json").read_text())
    assert schema == recipe_schema(), f"{how} schema > docs/reference/recipe.schema.json"


def user_keys() -> list[str]:
    """The keys that a user has to know.

    Leaves out sections that only contain other keys, the options of choices by name (such as an algorithm),
    and the keys of optional sections (such as `lora`).
    """
    holders = {f"recipe/{name}" for name in ("model", "environment", "resources", "stages")}
    own = [(name, key) for name, keys in list_sections().items() if KNOWN.match(name) for key in keys]
    all_keys = {f"{section}/{key.name}" for section, key in own}
    return [
        key
        for section, field in own
        if (key := f"{section}/{field.name}") not in holders
        and not any(
            f"{section}/{field.name[: end.start()]}" in all_keys for end in re.finditer(r"\.", field.name)
        )
    ]


def test_number_of_recipe_keys_is_bounded() -> None:
    keys = user_keys()
    assert len(set(keys)) == len(keys)
    for name in plugin_names():
        for field in load_plugin(name).spec.model_fields:
            key = f"task: {name}/{field}"  # a section counts by each of its keys
            assert any(other == key or other.startswith(f"{key}.") for other in keys)
    assert "environment: reasoning_gym/task" in keys
    assert "recipe/seed" in keys
    assert "recipe/stages" not in keys  # only contains other keys

    def fields(*prefixes: str) -> set[str]:
        """A nested section counts once: users who leave it out need its name at most."""
        return {key.split("/")[1].partition(".")[0] for key in keys if key.startswith(prefixes)}

    names = {task: fields(f"task: {task}/") for task in plugin_names()}
    known = fields("recipe", "model", ITS_ENVIRONMENT, "resources").union(*map(names.get, STORY))
    assert len(known) <= MOST_NAMES
    others = {task: names[task] for task in set(names) - set(STORY)}
    others |= {name: fields(f"environment: {name}/") for name in environment_ids()}
    for name, own in others.items():
        assert len(own - known) <= MOST_MORE, name


def test_every_recipe_key_has_a_description() -> None:
    for section, keys in list_sections().items():
        for key in keys:
            assert key.description, f"{section}: {key.name}"
            assert "|" not in key.description + key.type


@pytest.fixture(scope="module")
def schema() -> Any:
    """The schema as a validator, once for all recipes."""
    document = recipe_schema()
    kind = jsonschema.validators.validator_for(document)
    kind.check_schema(document)
    return kind(document)


@pytest.mark.parametrize("name", [name for name in bundled_recipes() if "/" not in name])
def test_bundled_recipes_match_the_json_schema(name: str, schema: Any) -> None:
    path = bundled_recipe(name)
    recipe = load_recipe(path)
    document = yaml.safe_load(path.read_text())
    schema.validate(document)
    assert {stage.name for stage in recipe.stages} == {stage["name"] for stage in document["stages"]}

    document["stages"][0]["flavour"] = "vanilla"
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(document)


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("rl.learning_rate=1", "lr"),
        ("rl.num_generations=8", "samples"),
        ("rl.per_device_train_batch_size=8", "prompts"),
        ("sft.per_device_train_batch_size=8", "batch_size"),
        ("rl.beta=0.1", "kl"),
        ("model.model_name_or_path=x", "path"),
    ],
)
def test_error_for_another_trainers_key_names_our_key(written: str, ours: str) -> None:
    with pytest.raises(RequestError, match="is not a known key") as refused:
        load_recipe(bundled_recipe("quickstart"), [written])
    assert refused.value.remedy.split("; ")[0] == f"'{ours}'"


def test_error_for_a_renamed_key_names_the_new_key() -> None:
    table = (REFERENCE / "renames.md").read_text().split("## Recipes")[1].split("##")[0]
    renamed = re.findall(r"^\| `(\w+)` .*\| `(\w+)` \|$", table, re.MULTILINE)
    assert ("calls", "calls_per_block") in renamed
    for old, new in renamed:
        assert suggest_name(old, [new, "turns"]).startswith(f"'{new}'"), old


def test_sections_below_names_are_listed() -> None:
    sections = {title: {key.name for key in keys} for title, keys in list_sections().items()}
    assert "rewards.NAME.function" in sections["recipe"]
    assert {"parts.NAME.weight", "parts.NAME.reward_scale"} <= sections["environment: mixture"]
    assert not any(name.startswith("metrics.NAME") for name in sections["task: rl"])  # one text: file.py:name


def test_every_option_in_the_trl_table_has_a_hint() -> None:
    table = (
        (REFERENCE.parent / "how-to" / "coming-from-trl.md").read_text().split("## Names")[1].split("##")[0]
    )
    cells = re.findall(r"^\| (.*) \| .* \|$", table, re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`(\w+)(?:=[^`]*)?`", cell)}
    options = {name for name in names if name.islower()} - {"model", "interleave_datasets"}
    assert len(options) > 25
    kinds = [load_plugin(task).spec.model_fields for task in ("sft", "preference", "rl")]
    silent = [
        name
        for name in options
        if all(name not in keys and suggest_name(name, keys).startswith("one of") for keys in kinds)
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("rl.epsilon=0.1", "algorithm: {name: grpo, clip_low: 0.2"),
        ("rl.reward_funcs=[a]", "rewards, a top-level key of the recipe"),
        ("sft.num_train_epochs=3", "steps, which is epochs x rows / batch_size"),
        ("sft.gradient_accumulation_steps=4", "batch_size"),
        ("sft.report_to=wandb", "tracking: ["),
        ("sft.packing=true", "leave it out"),
        ("rl.top_p=0.9", "leave it out: training samples from the whole distribution"),
        ("rl.ref_model_sync_steps=64", "leave it out: the reference is the checkpoint"),
        # and not process_rewards, the nearest name
        ("rl.scale_rewards=false", "algorithm: {name: dr_grpo, aggregation: token-mean}"),
        ("sft.eval_steps=10", "eval: {every: 10"),  # and not steps
        ("sft.warmup_ratio=0.1", "warmup, in steps"),
    ],
)
def test_error_for_an_option_without_equivalent_gives_a_remedy(written: str, ours: str) -> None:
    with pytest.raises(RequestError, match="is not a known key") as refused:
        load_recipe(bundled_recipe("quickstart"), [written])
    assert refused.value.remedy.startswith(ours)


def test_every_alias_names_recipe_keys() -> None:
    rows = re.findall(r"^\| `([\w.]+)`", render_markdown(), re.MULTILINE)
    keys = {part for row in rows for part in row.split(".")}
    assert {name for names in ALIASES.values() for name in names} <= keys
