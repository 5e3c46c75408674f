"""The parent evaluation that an evaluation is compared with."""

from perilune.metrics.lineage import find_parent_evaluation

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


def test_evaluations_are_compared_with_their_parent_checkpoint() -> None:
    assert find_parent_evaluation("of_sft", CHECKPOINTS, EVALUATIONS) == "base"
    assert find_parent_evaluation("of_first", CHECKPOINTS, EVALUATIONS) == "of_sft"
    assert find_parent_evaluation("of_second", CHECKPOINTS, EVALUATIONS) == "of_sft"
    assert find_parent_evaluation("base", CHECKPOINTS, EVALUATIONS) is None


def test_nearest_evaluated_ancestor_replaces_an_unevaluated_parent() -> None:
    without = {name: value for name, value in EVALUATIONS.items() if name != "of_second"}
    assert find_parent_evaluation("of_deep", CHECKPOINTS, EVALUATIONS) == "of_second"
    assert find_parent_evaluation("of_deep", CHECKPOINTS, without) == "of_sft"


def test_parent_evaluation_must_share_all_settings_but_counts() -> None:
    more = EVALUATIONS | {"of_sft": {"temperature": 1.0, "samples": 16, "tasks": 9}}
    assert find_parent_evaluation("of_first", CHECKPOINTS, more) == "of_sft"
    other = EVALUATIONS | {"of_sft": {"temperature": 0.5}}
    assert find_parent_evaluation("of_first", CHECKPOINTS, other) == "base"


def test_cyclic_checkpoint_ancestry_terminates() -> None:
    circle = {"a": "b", "b": "a", "of_a": "a"}
    assert find_parent_evaluation("of_a", circle, {"of_a": {}}) is None
