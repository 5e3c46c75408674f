"""Which evaluation another one is compared with."""

from perilune.metrics.lineage import parent_evaluation

CHECKPOINTS = {
    "base": "model",
    "sft": "model",
    "of_sft": "sft",
    "first": "sft",
    "second": "sft",
    "of_first": "first",
    "of_second": "second",
    "deep": "second",
    "of_deep": "deep",
}
EVALUATIONS = {name: {"temperature": 1.0} for name in ("base", "of_sft", "of_first", "of_second", "of_deep")}


def test_siblings_are_compared_with_their_parent() -> None:
    assert parent_evaluation("of_sft", CHECKPOINTS, EVALUATIONS) == "base"
    assert parent_evaluation("of_first", CHECKPOINTS, EVALUATIONS) == "of_sft"
    assert parent_evaluation("of_second", CHECKPOINTS, EVALUATIONS) == "of_sft"
    assert parent_evaluation("base", CHECKPOINTS, EVALUATIONS) is None


def test_an_ancestor_stands_in_for_a_parent_that_was_not_evaluated() -> None:
    without = {name: one for name, one in EVALUATIONS.items() if name != "of_second"}
    assert parent_evaluation("of_deep", CHECKPOINTS, EVALUATIONS) == "of_second"
    assert parent_evaluation("of_deep", CHECKPOINTS, without) == "of_sft"


def test_only_equal_settings_are_compared_but_for_the_amounts() -> None:
    more = EVALUATIONS | {"of_sft": {"temperature": 1.0, "samples": 16, "tasks": 9}}
    assert parent_evaluation("of_first", CHECKPOINTS, more) == "of_sft"
    other = EVALUATIONS | {"of_sft": {"temperature": 0.5}}
    assert parent_evaluation("of_first", CHECKPOINTS, other) == "base"


def test_a_hostile_folder_whose_checkpoints_form_a_circle_ends() -> None:
    circle = {"a": "b", "b": "a", "of_a": "a"}
    assert parent_evaluation("of_a", circle, {"of_a": {}}) is None
