"""The warning about answers without the expected format, in evaluations and in the first RL steps."""

from types import SimpleNamespace

import pytest

from perilune.tasks.checks.answer_form import FormWatch, form_share, rare_form_warning

PATH, PRESET = {"path": "somewhere"}, {"preset": "tiny"}


def job(model=PATH, **prompting):
    return SimpleNamespace(model=model, environment={"prompting": prompting or None})


def episode(**terms):
    return SimpleNamespace(reward_terms=terms)


def test_form_share_prefers_format_over_well_formed() -> None:
    assert form_share([episode(format=1.0, well_formed=0.0), episode(format=0.0, well_formed=0.0)]) == 0.5
    assert form_share([episode(well_formed=1.0), episode()]) == 1.0
    assert form_share([episode(raw=1.0)]) is None


@pytest.mark.parametrize(
    "asked, truncated, named, not_named",
    [
        (job(), 0.1, ["prompting.format", "few_shot", "sft"], ["max_tokens"]),
        (job(format="boxed"), 0.9, ["few_shot", "sft", "max_tokens"], ["prompting.format"]),
        (job(format="boxed", few_shot=2), 0.1, ["sft"], ["few_shot", "prompting.format"]),
        (job(PRESET), 0.1, ["sft"], ["few_shot", "prompting.format"]),
    ],
)
def test_warning_names_the_settings_to_change(asked, truncated, named, not_named) -> None:
    warning = rare_form_warning(0.01, truncated, asked)
    assert all(text in warning for text in ["1.0%", *named])
    assert not any(text in warning for text in not_named)
    assert rare_form_warning(0.05, truncated, asked) == rare_form_warning(None, truncated, asked) == ""


def test_form_watch_warns_after_three_steps() -> None:
    watch = FormWatch(SimpleNamespace(job=job()))
    lines = [{"term/format": share, "truncated": 0.0} for share in (0.0, 0.1, 0.0, 0.0)]
    assert [bool(watch.observe(line)) for line in lines] == [False, False, True, False]
    assert "3.3%" in watch.warning
    watch = FormWatch(SimpleNamespace(job=job()))
    assert not any(watch.observe({"term/well_formed": 0.1, "truncated": 0.0}) for _ in range(5))
    assert not any(watch.observe({"truncated": 0.0}) for _ in range(5))
