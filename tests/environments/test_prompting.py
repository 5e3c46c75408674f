"""The `prompting` section: the prompt, and parsing of answers."""

from dataclasses import replace
from itertools import islice

import pytest

from perilune.environments import Score, Task, Transcript, make_environment
from perilune.environments.core.multi_turn import MultiTurn, ask
from perilune.environments.core.prompted_environment import PromptedEnvironment
from perilune.environments.core.prompting import PromptingSettings
from perilune.environments.core.protocol import AgentTurn, Observation
from perilune.environments.core.replay import replay_conversation
from perilune.errors import RequestError
from perilune.verifiers.audit import audit_reward
from perilune.verifiers.conformance import check_environment

SUMS = {"id": "reasoning_gym", "task": "chain_sum", "config": {"min_terms": 2, "max_terms": 2}}


def make_prompted(section=SUMS, **prompting):
    return make_environment({**section, "prompting": prompting})


def first_task(environment, split="heldout"):
    return next(environment.tasks(split, 0))


def test_empty_prompting_section_changes_nothing() -> None:
    plain, empty = make_environment(SUMS), make_prompted()
    assert list(islice(plain.tasks("heldout", 0), 20)) == list(islice(empty.tasks("heldout", 0), 20))
    assert make_environment({**SUMS, "prompting": None}).tasks("train", 0)
    task = first_task(plain)
    for text in ("<answer>5</answer>", "5", plain.gold(task).text):
        assert empty.score(task, Transcript(text)) == plain.score(task, Transcript(text))


def test_prompt_contains_system_examples_and_question() -> None:
    plain = make_environment(SUMS)
    environment = make_prompted(system="Add.", few_shot=2, format="answer_tags")
    task = first_task(environment)
    assert task.task_id == first_task(plain).task_id
    system, *shots, question = task.prompt
    assert system == {"role": "system", "content": "Add."}
    own = first_task(plain).prompt[0]["content"]
    ask = "End with the final answer between tags: <answer>your answer</answer>"
    assert question == {"role": "user", "content": f"{own}\n\n{ask}"}
    examples = list(islice(plain.tasks("train", 0), 2))
    expected = []
    for example in examples:
        expected += [
            {"role": "user", "content": f"{example.prompt[0]['content']}\n\n{ask}"},
            {"role": "assistant", "content": f"<answer>{plain.gold(example).text}</answer>"},
        ]
    assert shots == expected
    trained = [task.task_id for task in islice(environment.tasks("train", 0), 30)]
    assert not {example.task_id for example in examples} & set(trained)
    assert trained == [task.task_id for task in islice(plain.tasks("train", 0), 2, 32)]


def test_instruct_and_system_as_settings_place_instruction_and_system() -> None:
    ask = {"format": "boxed", "instruction": "Box it."}
    own = first_task(make_environment(SUMS)).prompt[0]["content"]
    assert (
        first_task(make_prompted(**ask, system="Add.", instruct="system")).prompt[0]["content"]
        == "Add.\n\nBox it."
    )
    assert first_task(make_prompted(**ask, instruct="system")).prompt[0] == {
        "role": "system",
        "content": "Box it.",
    }
    (only,) = first_task(make_prompted(**ask, system="Add.", system_as="user")).prompt
    assert only == {"role": "user", "content": f"Add.\n\n{own}\n\nBox it."}
    assert (
        first_task(make_prompted(format="boxed", instruction="")).prompt
        == first_task(make_environment(SUMS)).prompt
    )
    shot = {"question": "1 + 1?", "answer": "1 + 1 = 2, so \\boxed{2}"}
    prompt = first_task(make_prompted(**ask, system="Add.", system_as="user", few_shot=[shot])).prompt
    assert [message["content"] for message in prompt] == [
        "Add.\n\n1 + 1?\n\nBox it.",
        "1 + 1 = 2, so \\boxed{2}",
        f"{own}\n\nBox it.",
    ]


def test_only_marked_answer_is_scored() -> None:
    environment = make_prompted(format="answer_tags")
    task = first_task(environment)
    gold = environment.gold(task)
    answer = task.data["answer"]
    assert gold.text == f"<answer>{answer}</answer>"
    right = environment.score(task, Transcript(f"Sum: <answer>{answer}</answer>"))
    assert right == Score(1.0, {"raw": 1.0, "well_formed": 1.0, "format": 1.0})
    assert environment.is_right(task, gold)
    for text in (answer, "", f"<answer>{answer}</answer><answer>{int(answer) + 1}</answer>"):
        outcome = environment.score(task, Transcript(text))
        assert (outcome.reward, outcome.terms["format"]) == (0.0, 0.0)
        assert not environment.is_right(task, Transcript(text))
    wrong = environment.score(task, Transcript(f"<answer>{int(answer) + 1}</answer>"))
    assert (wrong.reward, wrong.terms["format"]) == (0.0, 1.0)
    assert environment.score(task, Transcript(gold.text, finished=False)).terms["format"] == 0.0


def test_text_without_marked_answer_earns_nothing_from_lenient_verifier() -> None:
    environment = make_environment(
        {"id": "factory", "factory": "test_prompting:Lenient", "prompting": {"format": "boxed"}}
    )
    task = first_task(environment)
    assert environment.score(task, Transcript("hm")) == Score(0.0, {"kind": 0.0, "harm": -1.0, "format": 0.0})
    assert environment.score(task, Transcript("\\boxed{x}")).reward == 1.0


class Lenient:
    """Rewards every text with 1."""

    id = "lenient"

    def __init__(self, spec):
        pass

    def tasks(self, split, seed):
        from perilune.environments import Task

        yield Task("1", ({"role": "user", "content": "?"},), {})

    def score(self, task, transcript):
        return Score(1.0, {"kind": 1.0, "harm": -1.0})

    def close(self):
        pass


def test_format_is_reward_term() -> None:
    section = {**SUMS, "prompting": {"format": "json"}, "rewards": {"verifier": 1.0, "format": 0.1}}
    environment = make_environment(section)
    task = first_task(environment)
    assert environment.score(task, environment.gold(task)).reward == pytest.approx(1.1)
    outcome = environment.score(task, Transcript('{"answer": "no"}'))
    assert outcome.reward == pytest.approx(0.1)
    assert outcome.metrics["gold"] == 0.0


def test_every_action_of_multi_turn_episode_is_parsed() -> None:
    section = {"id": "calculator", "digits": 1, "prompting": {"format": "answer_tags", "few_shot": 1}}
    environment = make_environment(section)
    assert check_environment(section, tasks=2).findings == []
    task = first_task(environment)
    gold = environment.gold(task)
    assert all(action.startswith("<answer>") for action in gold.actions)
    outcome = environment.score(task, gold)
    assert (outcome.reward, outcome.terms["format"]) == (1.0, 1.0)
    texts = [message["content"] for message in replay_conversation(environment, task, gold)[-3:]]
    assert texts[1].startswith("=")  # the result of the operation in the tags
    unmarked = environment.score(task, Transcript(gold.text, earlier=("hm", *gold.earlier)))
    assert unmarked.terms["format"] == pytest.approx(len(gold.actions) / (len(gold.actions) + 1))


@pytest.mark.parametrize(
    "section, prompting, error",
    [
        (SUMS, {"format": "xml"}, "prompting.format"),
        (SUMS, {"fewshot": 3}, "no field"),
        (SUMS, {"instruction": "Say it."}, "no format"),
        (SUMS, {"few_shot": -1}, "negative"),
        (SUMS, {"stop": [""]}, "empty"),
        (SUMS, {"format": "boxed", "few_shot": [{"question": "1+1?", "answer": "2"}]}, "does not have"),
        ({**SUMS, "prompt": "compact"}, {"format": "boxed"}, "format of its own"),
        ({"id": "tools"}, {"format": "answer_tags"}, "format of its own"),
        ({"id": "open_spiel", "game": "tic_tac_toe"}, {"few_shot": 1}, "states no right answer"),
    ],
)
def test_contradicting_prompting_settings_are_rejected(section, prompting, error) -> None:
    with pytest.raises(RequestError, match=error) as caught:
        make_prompted(section, **prompting)
    assert caught.value.where.startswith("environment.prompting")


def test_more_examples_than_training_tasks_are_rejected(tmp_path) -> None:
    rows = "".join(f'{{"prompt": "{n}?", "answer": "{n}"}}\n' for n in range(30))
    (tmp_path / "rows.jsonl").write_text(rows)
    environment = make_prompted({"id": "jsonl", "path": str(tmp_path / "rows.jsonl")}, few_shot=40)
    with pytest.raises(RequestError, match="training tasks"):
        first_task(environment)


def test_examples_that_need_more_turns_than_an_episode_has_are_rejected() -> None:
    environment = make_prompted({"id": "calculator", "turns": 2}, few_shot=1)
    with pytest.raises(RequestError, match="cannot show the right answer"):
        first_task(environment)


@pytest.mark.parametrize(
    "section, grade",
    [
        ({**SUMS, "prompting": {"format": "answer_tags", "few_shot": 1}}, "A"),
        ({**SUMS, "prompting": {"format": "boxed"}}, "A"),
        ({**SUMS, "prompting": {"format": "json"}}, "A"),
        ({**SUMS, "prompting": {"format": "after_think"}}, "A"),
        ({**SUMS, "prompting": {"format": "last_number"}}, "C"),  # picks the last of several numbers
        ({**SUMS, "prompting": {"format": "boxed"}, "rewards": {"verifier": 1.0, "format": 0.1}}, "B"),
        ({"id": "instructions"}, "A"),
    ],
)
def test_audit_grades_each_answer_format(section, grade) -> None:
    audit = audit_reward(section, tasks=3, search_budget=40)
    assert audit.grade == grade, audit.findings[0]
    assert audit.form != "…" or section.get("prompting", {}).get("format") in (None, "last_number")


class Helped(MultiTurn):
    """The player asks, a sub-agent answers, and the player repeats the answer."""

    id = "helped"
    max_turns = 2

    def tasks(self, split, seed):
        yield Task("one", ({"role": "user", "content": "?"},), {})

    def gold(self, task):
        return Transcript("12", earlier=("ask", "twelve"))

    def is_right(self, task, transcript):
        return transcript.actions == ("ask", "twelve", "12")

    def play(self, task, rng):
        yield ask()
        turn = AgentTurn("helper", ({"role": "user", "content": "?"},))
        yield Observation(turns=(turn,))
        answer = yield ask("done")
        yield Observation(rewards=(float(answer == "12"),), done=True)


def test_format_applies_only_to_player():
    environment = PromptedEnvironment(Helped(), PromptingSettings(format="boxed"))
    task = next(environment.tasks("train", 0))
    gold = environment.gold(task)
    assert gold.actions == ("\\boxed{ask}", "twelve", "\\boxed{12}")
    assert environment.is_right(task, gold) and environment.score(task, gold).reward == 1.0
    assert not environment.is_right(task, replace(gold, earlier=("\\boxed{ask}", "\\boxed{twelve}")))
