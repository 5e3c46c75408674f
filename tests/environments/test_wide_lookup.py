"""Wide lookups: an orchestrator reads shards, or spawns sub-agents that read them."""

import math
from itertools import islice

import pytest

from perilune.data.generators import make_teacher
from perilune.environments import Task, Transcript, make_environment
from perilune.environments.core.replay import replay_conversation
from perilune.errors import RequestError
from perilune.verifiers.conformance import check_environment

KEYS = 4
TASK = Task(
    "0" * 32,
    ({"role": "user", "content": "ABCD\n"},),
    {
        "shards": {"A": "xA1y", "B": "B2z", "C": "wwC3", "D": "D4"},
        "values": dict(zip("ABCD", "1234", strict=True)),
    },
)
SPAWN_ALL = "+A\n+B\n+C\n+D\n*"
ALL = "A1\nB2\nC3\nD4\n."


def section(**settings):
    return {"id": "wide_lookup", "keys": [KEYS], **settings}


def play(*by_agent, task=TASK, **settings):
    """Plays an episode in rounds: each round takes all due turns.

    Args:
        by_agent: the actions of the player, of the first sub-agent, of the second and so on. The last action
            of a sub-agent repeats.

    Returns:
        the last observation, the number of rounds, and all messages that the player saw.
    """
    environment = make_environment(section(**settings))
    left = [[*actions] for actions in by_agent]
    session = environment.reset(task, 0)
    rounds, seen = 0, []
    while not session.observation.done:
        turns = session.observation.due
        rounds += 1
        for turn in turns:
            if not turn.agent:
                seen += [message["content"] for message in turn.messages]
            own = left[int(turn.agent) + 1 if turn.agent else 0]
            session.step(own.pop(0) if not turn.agent or len(own) > 1 else own[0])
    return session.observation, rounds, seen


def reader(key, value):
    return [f"?{key}", f"{key}{value}\n."]


READERS = [reader(key, value) for key, value in TASK.data["values"].items()]


def test_single_agent_reads_one_shard_per_turn():
    end, rounds, seen = play(["?A", "A1\n?B", "B2\n?C", "C3\n?D", "D4\n."])
    assert end.rewards == (1.0,) and rounds == end.metrics["critical_steps"] == KEYS + 1
    assert end.terms == {"parallel": 0.0, "finish": 0.0, "performance": 1.0}
    assert seen == ["xA1y\n", "B2z\n", "wwC3\n", "D4\n"] and end.metrics["own_reads"] == KEYS


def test_sub_agents_read_in_parallel_and_return_only_values():
    end, rounds, seen = play([SPAWN_ALL, "."], *READERS)
    assert end.rewards == (1.0,) and rounds == end.metrics["critical_steps"] == 4
    assert end.terms == {
        "parallel": pytest.approx(math.log(5) / math.log(17)),
        "finish": 1.0,
        "performance": 1.0,
    }
    assert seen == ["A1\nB2\nC3\nD4\n"]


def test_orchestrator_continues_until_join():
    end, rounds, seen = play(["+A\n+B\n?C", "C3\n?D", "D4\n*", "."], *READERS[:2])
    assert end.rewards == (1.0,) and rounds == end.metrics["critical_steps"] == 4
    assert seen == ["wwC3\n", "D4\n", "A1\nB2\n"]


def test_sub_agent_may_have_several_keys():
    end, rounds, seen = play(["+AB\n+CD\n*", "."], ["?A", "A1\n?B", "B2\n."], ["?C", "C3\n?D", "D4\n."])
    assert end.rewards == (1.0,) and rounds == 5 and seen == ["A1\nB2\nC3\nD4\n"]
    assert end.metrics["spawned"] == 2 and end.terms["finish"] == 1.0


def test_sub_agent_turns_setting_ends_endless_sub_agent():
    end, rounds, seen = play([SPAWN_ALL, "A1\n."], ["?A"], *READERS[1:], sub_agent_turns=6)
    assert rounds == end.metrics["critical_steps"] == 1 + 6 + 1
    assert seen == ["!\nB2\nC3\nD4\n"] and end.rewards == (1.0,)
    assert end.metrics["finished"] == 3 and end.terms["finish"] == 0.75


def test_sub_agent_without_value_does_not_count_as_finished():
    end, _, seen = play([SPAWN_ALL, "."], ["."], *READERS[1:])
    assert seen == ["!\nB2\nC3\nD4\n"] and end.rewards == (0.0,) and end.metrics["finished"] == 3


def test_sub_agents_above_limit_are_spawned_but_never_run():
    end, _, seen = play(["+A\n" * 6 + "*", "."], *[READERS[0]] * 2, sub_agents=2)
    assert seen == ["!\n!\n!\n!\nA1\nA1\n"]
    assert (end.metrics["spawned"], end.metrics["finished"]) == (6, 2)
    assert end.terms["parallel"] == pytest.approx(math.log(7) / math.log(17)) and end.terms[
        "finish"
    ] == pytest.approx(1 / 3)


def test_sub_agents_without_join_are_abandoned():
    end, rounds, _ = play(["+A\n+B", "A1\nB2\nC3\nD4\n."], ["?A"], ["?B"])
    assert rounds == 2 and end.rewards == (1.0,) and end.metrics["finished"] == 0


@pytest.mark.parametrize(("budget", "reward"), [(4, 1.0), (3, 0.0)])
def test_reward_requires_critical_steps_within_budget(budget, reward):
    end, _, _ = play([SPAWN_ALL, "."], *READERS, critical_budget=budget)
    assert end.rewards == (reward,) and end.terms["performance"] == reward and end.metrics["right"] == 1.0


@pytest.mark.parametrize(
    ("action", "shown", "bad"),
    [
        ("?A\n?B", "xA1y\n!\n", 1),
        ("?Z", "!\n", 1),
        ("hello\n+a\n+\nA12\n?", "!\n!\n!\n!\n!\n", 5),
        ("*\n?A", "!\n", 1),
        ("*", "\n", 0),
        ("A1\n\n?A", "\n", 0),
        ("", "\n", 0),
    ],
)
def test_invalid_lines_are_shown_and_counted(action, shown, bad):
    end, _, seen = play([action, "."])
    assert seen == [shown] and end.metrics["bad_lines"] == bad and end.rewards == (0.0,)


def test_sub_agent_can_neither_spawn_nor_join():
    end, rounds, seen = play(["+A\n*", "."], ["+B\n*", "A1\n."])
    assert rounds == 4 and seen == ["A1\n"] and end.metrics["spawned"] == 1


def test_last_turn_ends_episode():
    end, rounds, _ = play(["A1\nB2\nC3\nD4", "?A", "?B"], turns=3)
    assert rounds == 3 and end.rewards == (1.0,) and not end.truncated


@pytest.mark.parametrize(("strategy", "steps"), [("serial", KEYS + 1), ("parallel", 4)])
def test_wide_lookup_teacher_finds_all_values(strategy, steps):
    environment = make_environment(section(critical_budget=steps))
    teacher = make_teacher("wide_lookup", {strategy: 1.0})
    for item in islice(teacher.candidates(environment.tasks("train", 0), 0), 8):
        score = environment.score(item.task, item.transcript)
        assert score.reward == 1.0 and score.metrics["critical_steps"] == steps
        if strategy == "parallel":
            seen = replay_conversation(environment, item.task, item.transcript)
            assert not any(
                shard in turn["content"] for turn in seen for shard in item.task.data["shards"].values()
            )


def test_single_key_task_equals_prompt_of_sub_agent():
    (task,) = islice(make_environment(section(keys=[1])).tasks("train", 0), 1)
    (key,) = task.data["values"]
    session = make_environment(section()).reset(TASK, 0)
    (turn,) = session.step(f"+{key}\n*").due
    assert turn.messages == task.prompt
    teacher = make_teacher("wide_lookup", {"parallel": 1.0})
    ((read, note),) = [item.transcript.actions for item in teacher.candidates([task], 0)]
    assert (read, note) == (f"?{key}", f"{key}{task.data['values'][key]}\n.")


def test_wide_lookup_teacher_rejects_other_environments():
    with pytest.raises(RequestError, match="supports only"):
        list(make_teacher("wide_lookup").candidates([Task("0", (), {})], 0))


@pytest.mark.parametrize("budget", [None, 4])
def test_wide_lookup_passes_conformance(budget):
    assert not check_environment(section(critical_budget=budget)).findings


def test_shards_contain_values():
    tasks = list(islice(make_environment(section(letters=5, keys=[2, 6])).tasks("heldout", 0), 50))
    assert {len(task.data["values"]) for task in tasks} == {2, 6} and len(
        {task.task_id for task in tasks}
    ) == 50
    for task in tasks:
        for key, value in task.data["values"].items():
            shard = task.data["shards"][key]
            assert key + value in shard and len(shard) == 7 and sum(map(str.isdigit, shard)) == 1


def test_truncated_turn_is_ignored_and_ends_episode():
    session = make_environment(section()).reset(TASK, 0)
    for action in ("+A\nA1\nB2\nC3\nD4", "?A"):
        end = session.step(action, finished=action != "?A")
    assert not end.done and end.due[0].agent == "0"  # which was due at the same time
    end = session.step("?A")
    assert end.done and end.rewards == (1.0,) and end.terms["finish"] == 0.0


def test_answer_format_applies_only_to_orchestrator():
    actions = [
        f"<answer>{SPAWN_ALL}</answer>",
        *(turn for turns in zip(*READERS, strict=True) for turn in turns),
        ".",
    ]
    environment = make_environment(section(prompting={"format": "answer_tags"}))
    session = environment.reset(TASK, 0)
    for action in actions:
        assert not session.step(action).done  # the last one has no format, so it is empty
    end = session.step("<answer>.</answer>")
    assert end.rewards == (1.0,) and end.terms["format"] == pytest.approx(2 / 3)
    score = environment.score(TASK, Transcript("<answer>.</answer>", earlier=tuple(actions)))
    assert score.reward == 1.0 and score.terms == end.terms


def test_notes_last_reads_only_last_action() -> None:
    earlier = ["?A", "A1\n?B", "B2\n?C", "C3\n?D"]
    forgotten, _, _ = play([*earlier, "D4\n."], notes="last")
    repeated, _, _ = play([*earlier, ALL], notes="last")
    assert (forgotten.rewards, repeated.rewards) == ((0.0,), (1.0,))


@pytest.mark.parametrize(("rule", "strategy"), [("fold", "repeated"), ("policy", "folded")])
def test_wide_lookup_teacher_is_correct_with_managed_context(rule: str, strategy: str) -> None:
    environment = make_environment(section(notes="last", context={"rule": rule, "above": 30, "last": 1}))
    teacher = make_teacher("wide_lookup", {strategy: 1.0}, {})
    for item in teacher.candidates(list(islice(environment.tasks("train", 0), 3)), 0):
        outcome = environment.score(item.task, Transcript(item.text, earlier=item.earlier))
        assert outcome.reward == 1 and outcome.metrics["contexts"] > 1
        assert ("<fold>" in "".join(item.earlier)) == (rule == "policy")
