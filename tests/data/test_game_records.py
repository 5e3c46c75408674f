"""Records of teachers' games: the environment's messages, filters by outcome, and move probabilities."""

import json
from functools import partial
from itertools import islice

import pytest

from perilune.data.filtering import FilterSettings, filter_files
from perilune.data.generators import (
    Rejected,
    make_teacher,
    provenance_of,
    teacher_candidates,
    verify_candidates,
)
from perilune.data.records import deduplicate, read_records, write_records
from perilune.environments import KeyedRandom, Transcript, make_environment
from perilune.environments.core.replay import replay_agent_conversations
from perilune.errors import RequestError
from perilune.games.open_spiel_match import Match
from perilune.games.teachers import BEST_TEACHERS, make_game_teacher


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory):
    """All tests share one home, so that each game is solved once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERILUNE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def section(game, **more):
    return {"id": "open_spiel", "game": game, **more}


def collect_games(about, count, seed=0, strategies=None, **options):
    """Records and rejected candidates of the first tasks."""
    environment = make_environment(about)
    teacher = make_teacher("open_spiel", strategies, options)
    verified = verify_candidates(
        islice(teacher_candidates(teacher, environment, seed), count),
        lambda pairs: [environment.score(task, transcript) for task, transcript in pairs],
        environment=environment.id, seed=seed, converse=partial(replay_agent_conversations, environment),
        provenance=provenance_of(teacher, about, options=options),
    )  # fmt: skip
    kept, rejected = [], []
    for result in verified:
        (rejected if isinstance(result, Rejected) else kept).append(result)
    return kept, rejected


GAMES = {
    "tic_tac_toe": {}, "kuhn_poker": {}, "leduc_poker": {}, "goofspiel": {"num_cards": 3},
    "liars_dice": {"dice_sides": 2}, "hex": {"board_size": 3}, "clobber": {"rows": 3, "columns": 3},
    "connect_four": {}, "othello": {}, "gin_rummy": {},
}  # fmt: skip


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("opponent", ["self", "random"])
def test_game_record_contains_messages_that_environment_shows_policy(game, opponent):
    """Playing the record's actions in a session gives the record's messages, word for word."""
    about = section(game, config=GAMES[game], opponent=opponent)
    environment = make_environment(about)
    kept, _ = collect_games(about, 2 if game in ("othello", "gin_rummy") else 6, keep="any", simulations=4)
    tasks = {task.task_id: task for task in islice(environment.tasks("train", 0), 12)}
    assert kept
    for record in kept:
        task, seat = tasks[record.task_id], record.details["seat"]
        session = environment.reset(task, record.seed)
        messages = list(task.prompt)
        for action in record.details["actions"]:
            observation = session.observation
            assert action in observation.legal
            if opponent == "random" or observation.player == seat:
                messages += [*observation.messages, {"role": "assistant", "content": action}]
            ended = session.step(action)
        assert ended.done and tuple(messages) == record.messages
        assert ended.rewards[seat if opponent == "self" else 0] == record.score
        assert len(record.details["probabilities"]) == sum(
            message["role"] == "assistant" for message in record.messages
        )
        assert record.provenance.generator == "open_spiel" and seat == task.data["seat"]


@pytest.mark.parametrize("game", ["kuhn_poker", "leduc_poker", "goofspiel", "liars_dice", "tic_tac_toe"])
def test_game_record_contains_observations_that_teacher_used(game):
    """The teacher's table, applied to the recorded observations, gives the recorded probabilities."""
    about = section(game, config=GAMES[game])
    environment = make_environment(about)
    teacher = make_game_teacher(BEST_TEACHERS[game], environment.game)
    kept, _ = collect_games(about, 12, keep="any")
    for record in kept:
        match = Match(environment.game, KeyedRandom(record.seed, record.task_id))
        observed, likely = [], []
        for action in record.details["actions"]:
            text, moves = environment.describe(match.state, match.player)
            if match.player == record.details["seat"]:
                observed.append(text)
                likely.append(teacher.probabilities(match.state, match.player, 0)[moves[action]])
            match.take(moves[action])
        assert observed == [turn["content"] for turn in record.messages[1:] if turn["role"] == "user"]
        assert likely == record.details["probabilities"]


def test_records_follow_equilibrium_probabilities_unless_greedy():
    """Records bet with a king as often as the equilibrium does, because equal games are not removed."""
    about = section("kuhn_poker")
    kept, rejected = collect_games(about, 900, strategies={"teacher": 1.0}, seats="first")
    assert len(kept) == 900 and not rejected and list(deduplicate(kept)) == kept
    kings = [row for row in kept if row.messages[1]["content"].startswith("your card K")]
    share = sum(row.messages[2]["content"] == "Bet" for row in kings) / len(kings)
    expected = make_game_teacher("cfr", make_environment(about).game).table["2"][1]
    assert abs(share - expected) < 4 * (0.25 / len(kings)) ** 0.5 and 0.3 < expected < 0.9
    for row in kings:
        assert row.details["probabilities"][0] == pytest.approx(
            expected if row.messages[2]["content"] == "Bet" else 1 - expected
        )
    greedy, rejected = collect_games(about, 200, strategies={"teacher": 1.0}, seats="first", greedy=True)
    likeliest = {row.messages[2]["content"] for row in greedy if "your card K" in row.messages[1]["content"]}
    assert len(likeliest) == 1 and {row.reason for row in rejected} == {"duplicate"}
    few, _ = collect_games(about, 200, strategies={"teacher": 1.0}, repeats=False)
    assert len(few) < 30


def test_records_without_history_hold_one_position_each():
    """Equal positions of a perfect player are removed. In games with chance they keep the frequencies."""
    about = section("tic_tac_toe", history=False, show_rules=False, list_moves=False)
    kept, rejected = collect_games(about, 200, strategies={"random": 1.0}, greedy=True)
    shown = [record.messages for record in kept]
    assert {len(messages) for messages in shown} == {2} and len(set(map(str, shown))) == len(shown)
    assert {record.agent != "" for record in kept} == {True, False} and rejected
    games = {record.task_id for record in kept}
    assert len(games) + len(rejected) == 200 and len(kept) > len(games)

    mixed, _ = collect_games(section("leduc_poker", history=False), 60)
    later = [str(record.messages) for record in mixed if record.agent]
    assert len(set(later)) < len(later)


def test_filter_keeps_all_records_of_mixed_strategy(tmp_path):
    kept, _ = collect_games(section("kuhn_poker"), 100)
    write_records(tmp_path / "traces.jsonl", kept)
    report = filter_files([tmp_path / "traces.jsonl"], [], FilterSettings(), tmp_path / "clean")
    assert report["train"] == len(kept) == 100


def test_keep_and_seats_options_select_games():
    about = section("tic_tac_toe")
    kept, rejected = collect_games(about, 60)
    assert {record.score for record in kept} == {0.0, 1.0} and len(kept) + len(rejected) == 60
    assert {record.reason for record in rejected} <= {"duplicate"}  # perfect play never loses
    won, rejected = collect_games(about, 60, keep="won")
    assert {record.score for record in won} == {1.0} and "score 0 is below 1e-09" in {
        record.reason for record in rejected
    }
    most, _ = collect_games(section("leduc_poker"), 60, keep=2.0)
    every, rejected = collect_games(section("leduc_poker"), 60)
    assert min(record.score for record in most) >= 2.0 and min(record.score for record in every) < 0
    assert not rejected
    assert {record.details["seat"] for record in every} == {0, 1}
    assert {record.details["seat"] for record in collect_games(about, 20, seats="second")[0]} == {1}


def test_game_records_depend_only_on_seed():
    about, shares = section("tic_tac_toe"), {"teacher": 0.2, "random": 0.5, "mcts": 0.3}
    first, _ = collect_games(about, 80, strategies=shares, simulations=4)
    again, _ = collect_games(about, 80, strategies=shares, simulations=4)
    other, _ = collect_games(about, 80, seed=1, strategies=shares, simulations=4)
    assert first == again != other
    assert {record.source for record in first} == {f"open_spiel/{name}" for name in shares}
    assert len({record.digest for record in first}) == len(first)


def test_record_details_round_trip_through_file(tmp_path):
    kept, _ = collect_games(section("kuhn_poker"), 5)
    write_records(tmp_path / "records.jsonl", kept)
    assert read_records(tmp_path) == kept
    row = json.loads((tmp_path / "records.jsonl").read_text().splitlines()[0])
    assert set(row["details"]) == {"game", "policy", "opponent", "seat", "actions", "probabilities", "mixed"}
    row["details"] = "none"
    (tmp_path / "records.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(RequestError, match="details"):
        read_records(tmp_path)


def test_record_actions_score_as_transcript_of_teacher_seat():
    about = section("tic_tac_toe")
    environment = make_environment(about)
    (record, *_), _ = collect_games(about, 4)
    (task,) = [task for task in islice(environment.tasks("train", 0), 8) if task.task_id == record.task_id]
    *earlier, last = record.details["actions"]
    transcript = Transcript(last, earlier=tuple(earlier), seed=record.seed, player=record.details["seat"])
    assert environment.score(task, transcript).reward == record.score


@pytest.mark.parametrize(
    ("about", "arguments", "message"),
    [
        (section("tic_tac_toe"), {"options": {"kep": "won"}}, r"options.kep.*(?s:.)*did you mean 'keep'"),
        (section("connect_four"), {"options": {"policy": "cfr"}}, "options.policy"),
        (section("tic_tac_toe"), {"strategies": {"rules": 1.0}}, "strategies.rules"),
        (
            section("kuhn_poker", opponent="random"),
            {"strategies": {"cfr": 1.0}},
            "already defines the opponent 'random'",
        ),
        (section("breakthrough"), {}, "no default game teacher"),
        ({"id": "calculator"}, {}, "supports only the environment 'open_spiel'"),
        (section("tic_tac_toe", prompting={"format": "boxed"}), {}, "without an answer format"),
    ],
)
def test_game_teacher_rejects_invalid_options_and_environments(about, arguments, message):
    with pytest.raises(RequestError) as caught:
        teacher_candidates(make_teacher("open_spiel", **arguments), make_environment(about), 0)
    assert caught.match(message)


def test_game_records_contain_the_system_prompt_of_the_environment():
    kept, _ = collect_games(section("tic_tac_toe", prompting={"system": "Play well."}), 2)
    assert all(record.messages[0] == {"role": "system", "content": "Play well."} for record in kept)
    assert [record.messages[1:] for record in kept] == [
        record.messages for record in collect_games(section("tic_tac_toe"), 2)[0]
    ]


def test_gold_teacher_rejects_options():
    with pytest.raises(RequestError, match=r"options\.keep"):
        make_teacher("gold", None, {"keep": 1})


def test_random_policy_plays_every_legal_move():
    kept, _ = collect_games(section("kuhn_poker"), 200, policy="random")
    assert len({tuple(message["content"] for message in record.messages) for record in kept}) == 24
    assert {chance for record in kept for chance in record.details["probabilities"]} == {0.5}


def test_epsilon_mixes_random_moves_into_probabilities():
    about = section("kuhn_poker", list_moves=False)
    kept, _ = collect_games(about, 400, strategies={"teacher": 1.0}, seats="second", epsilon=0.5)
    facing_a_bet_with_a_king = {
        record.messages[-1]["content"]: record.details["probabilities"][-1]
        for record in kept
        if record.messages[1]["content"] == "your card K\nso far Bet\n"
    }
    assert facing_a_bet_with_a_king == pytest.approx({"Pass": 0.25, "Bet": 0.75}, abs=0.001)
