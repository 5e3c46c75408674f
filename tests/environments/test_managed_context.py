"""The `context` section: the messages that each rule keeps, and the context of each turn."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from perilune.environments import KeyedRandom, MultiTurn, Task, Transcript, ask, end_episode
from perilune.environments.core.managed_context import ContextSettings, ManagedContext
from perilune.environments.core.protocol import Observation, Score
from perilune.environments.core.replay import replay_agent_conversations
from perilune.errors import RequestError


class Echo(MultiTurn):
    """Repeats each action with filler text and ends at "done". The reward is the number of turns."""

    id, max_turns = "echo", 6

    def tasks(self, split: Any, seed: int) -> Iterator[Task]:
        yield Task("t", ({"role": "user", "content": "task"},), {})

    def play(self, task: Task, rng: KeyedRandom) -> Any:
        action, turns = (yield ask()), 1
        while action != "done":
            action = yield ask(f"out {action} " + "." * 20, role="tool")
            turns += 1
        yield end_episode(float(turns), terms={"turns": float(turns)})


def play(
    settings: Mapping[str, Any], actions: Sequence[str]
) -> tuple[Observation, list[tuple[str, list[str]]], float]:
    """The last observation, (agent, texts that it saw) of each turn, and the reward of a replay."""
    environment = ManagedContext(Echo(), ContextSettings(**settings))
    task = next(environment.tasks("train", 0))
    session = environment.reset(task, 0)
    seen = []
    for action in actions:
        (turn,) = session.observation.due
        seen.append((turn.agent, [message["content"] for message in turn.messages]))
        session.step(action)
    end = session.observation
    session.close()
    outcome = environment.score(task, Transcript(actions[-1], earlier=tuple(actions[:-1])))
    assert isinstance(outcome, Score)
    return end, seen, outcome.reward


def out(action: str) -> str:
    return f"out {action} " + "." * 20


def test_context_is_unchanged_below_limit() -> None:
    end, seen, reward = play({"rule": "fold"}, ["a", "b", "done"])
    assert seen == [("", []), ("", [out("a")]), ("", [out("b")])]
    assert end.rewards == (3.0,) and reward == 3.0 and end.metrics["contexts"] == 1


def test_fold_removes_earlier_turns() -> None:
    end, seen, reward = play({"rule": "fold", "above": 60, "last": 1}, ["a", "b", "c", "d", "done"])
    assert seen[2] == ("", [out("b")])  # 55 characters
    assert seen[3] == ("0", ["task\n\n[2 earlier turns are not shown]", out("b"), "c", out("c")])
    assert seen[4][1][0] == "task\n\n[3 earlier turns are not shown]" and seen[4][0] == "1"
    assert end.metrics["contexts"] == 3 and end.rewards == (5.0,) and reward == 5.0


def test_drop_output_keeps_actions() -> None:
    _, seen, _ = play({"rule": "drop_output", "above": 60, "last": 1}, ["a", "b", "c", "done"])
    assert seen[3] == ("0", ["task", "a", "[dropped]", "b", out("b"), "c", out("c")])


def test_drop_output_keeps_context_with_nothing_to_drop() -> None:
    _, seen, _ = play({"rule": "drop_output", "above": 1, "last": 4}, ["a", "b", "done"])
    assert [agent for agent, _ in seen] == ["", "", ""]


def test_summarize_asks_in_old_context_and_continues_in_new_one() -> None:
    settings = {"rule": "summarise", "above": 60, "last": 0, "ask": "sum up"}
    end, seen, reward = play(settings, ["a", "b", "c", "saw c", "done"])
    assert seen[3] == ("", [out("c"), "sum up"])
    assert seen[4] == ("0", ["task\n\nSummary of the earlier turns: saw c", out("c")])
    assert end.rewards == (4.0,) and reward == 4.0  # the summary does not count as a turn of the environment


def test_policy_rule_replaces_turns_with_text_of_fold_tags() -> None:
    actions = ["a", "<fold>saw a</fold>b", "c", "<fold>saw b, c</fold>", "done"]
    end, seen, reward = play({"rule": "policy"}, actions)
    assert seen[1] == ("", [out("a")]) and seen[3] == ("0", [out("c")])
    assert seen[2] == ("0", ["task\n\nSummary of the earlier turns: saw a", "b", out("b")])
    assert seen[4] == ("1", ["task\n\nSummary of the earlier turns: saw b, c", out("c")])
    assert end.rewards == (4.0,) and reward == 4.0


def test_fold_in_every_action_does_not_prolong_episode() -> None:
    end, seen, _ = play({"rule": "policy"}, ["<fold>x</fold>"] * 12)
    assert end.done and end.truncated and len(seen) == 12


def test_max_turns_of_environment_applies_with_summaries() -> None:
    settings = {"rule": "summarise", "above": 1, "last": 0}
    end, *_ = play(settings, ["a", *["s", "b"] * 5])
    assert end.done and end.truncated


def test_cut_off_action_ends_the_episode_in_a_later_context() -> None:
    environment = ManagedContext(Echo(), ContextSettings(rule="policy"))
    session = environment.reset(next(environment.tasks("train", 0)), 0)
    session.step("<fold>saw a</fold>")
    assert session.observation.due[0].agent == "0"
    end = session.step("done", finished=False)
    assert end.done and end.truncated and not end.rewards


@pytest.mark.parametrize("rule", ["fold", "drop_output"])
def test_each_action_has_loss_weight_in_one_context_only(rule: str) -> None:
    environment = ManagedContext(Echo(), ContextSettings(rule=rule, above=60, last=1))  # type: ignore[arg-type]
    actions = ["a", "b", "c", "d", "done"]
    transcript = Transcript(actions[-1], earlier=tuple(actions[:-1]))
    agents = replay_agent_conversations(environment, next(environment.tasks("train", 0)), transcript)
    assert len(agents) > 1
    replies = [turn for messages in agents.values() for turn in messages if turn["role"] == "assistant"]
    assert [reply["content"] for reply in replies if reply.get("weight", 1)] == actions
    assert rule == "fold" or any(reply.get("weight") == 0 for reply in replies)


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"id": "oolong", "context": {"rule": "fold"}}, "oolong has a single turn"),
        (
            {
                "id": "open_spiel",
                "game": "tic_tac_toe",
                "opponent": "random",
                "history": False,
                "context": {"rule": "fold"},
            },
            "begins a new context in each turn",
        ),
        ({"id": "tools", "context": {"rule": "cut"}}, "context.rule: Input should be"),
        ({"id": "tools", "context": {"rule": "fold", "abve": 3}}, "no field 'context.abve'"),
    ],
)
def test_invalid_context_sections_are_rejected(section: dict[str, Any], error: str) -> None:
    from perilune.environments import make_environment

    with pytest.raises(RequestError, match=error):
        make_environment(section)
