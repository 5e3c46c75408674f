"""OpenSpiel games as text environments, with the real package."""

from itertools import islice

import pytest

from perilune.environments import KeyedRandom, Transcript, make_environment
from perilune.errors import RequestError
from perilune.verifiers.conformance import check_environment

GAMES = ("goofspiel", "leduc_poker", "kuhn_poker", "liars_dice", "gin_rummy",
         "othello", "hex", "clobber", "connect_four", "tic_tac_toe")  # fmt: skip
SMALL = {"goofspiel": {"num_cards": 5}, "hex": {"board_size": 4}}


def section(game, **more):
    return {"id": "open_spiel", "game": game, "config": SMALL.get(game, {}), **more}


def play_out(environment, task, seed=0, moves=()):
    """Play a game to its end: `moves` first, then at random. Returns the actions and the observations."""
    session = environment.reset(task, seed)
    rng, actions, seen = KeyedRandom(seed, task.task_id), [], [session.observation]
    while not session.observation.done:
        turn = len(actions)
        legal = session.observation.legal
        actions.append(moves[turn] if turn < len(moves) else rng.choice(legal, "play", turn))
        seen.append(session.step(actions[-1]))
    return actions, seen


def first_task(environment, seat=0):
    return next(task for task in environment.tasks("train", 0) if task.data["seat"] == seat)


@pytest.mark.parametrize(
    "game",
    [
        game if game in {"leduc_poker", "tic_tac_toe"} else pytest.param(game, marks=pytest.mark.thorough)
        for game in GAMES
    ],
)
def test_every_game_passes_check_environment(game):
    assert not check_environment(section(game), tasks=1).findings


@pytest.mark.parametrize("game", GAMES)
def test_session_rewards_are_zero_sum_and_match_score(game):
    environment = make_environment(section(game))
    assert environment.players == 2
    for task in islice(environment.tasks("train", 1), 3):
        actions, seen = play_out(environment, task)
        rewards = seen[-1].rewards
        assert sum(rewards) == 0 and all(not view.rewards for view in seen[:-1])
        for player in (0, 1):
            score = environment.score(
                task, Transcript(actions[-1], earlier=tuple(actions[:-1]), player=player)
            )
            assert score.reward == rewards[player]
        assert all(len(set(view.legal)) == len(view.legal) for view in seen[:-1])
        assert max(len(view.messages[0]["content"]) for view in seen[:-1]) < 900


def test_observation_lists_moves_and_winner_gets_the_reward():
    environment = make_environment(section("tic_tac_toe"))
    _, seen = play_out(environment, first_task(environment), moves=("0,0", "1,0", "0,1", "1,1", "0,2"))
    assert seen[4].messages[0]["content"] == "you are x\nxx.\noo.\n...\nmoves 0,2 1,2 2,0 2,1 2,2\n"
    assert (len(seen), seen[-1].rewards) == (6, (1.0, -1.0))


def test_later_turns_see_only_the_state_when_history_is_off():
    short = {"history": False, "show_rules": False, "list_moves": False}
    assert not check_environment(section("tic_tac_toe", **short), tasks=1).findings
    environment, whole = (make_environment(section("tic_tac_toe", **more)) for more in (short, {}))
    task, moves = first_task(environment), ("0,0", "1,0", "0,1", "1,1", "0,2")
    _, seen = play_out(environment, task, moves=moves)
    assert task.prompt == () and first_task(whole).prompt
    assert [view.messages[0]["content"] for view in seen[:2]] == [
        "you are x\n...\n...\n...\n",
        "you are o\nx..\n...\n...\n",
    ]
    own = [(view.player, view.due[0].agent, view.due[0].messages) for view in seen[2:5]]
    assert [(player, agent) for player, agent, _ in own] == [(0, "0"), (1, "0"), (0, "1")]
    assert own[2][2] == ({"role": "user", "content": "you are x\nxx.\noo.\n...\n"},)
    with_rules = make_environment(section("tic_tac_toe", history=False))
    _, seen = play_out(with_rules, first_task(with_rules), moves=moves)
    assert (
        seen[2].due[0].messages[0] == first_task(with_rules).prompt[0] and len(seen[2].due[0].messages) == 2
    )
    assert seen[-1].rewards == (1.0, -1.0)


def test_random_moves_open_with_unfinished_positions():
    environment = make_environment(section("tic_tac_toe", random_moves=6))
    task, boards, players = first_task(environment), [], set()
    for seed in range(60):
        opened, again = (environment.reset(task, seed).observation for _ in range(2))
        assert opened == again
        boards.append(opened.messages[0]["content"].partition("moves")[0])
        players.add(opened.player)
    assert {9 - board.count(".") for board in boards} == set(range(7)) and players == {0, 1}
    actions, seen = play_out(environment, task, seed=3)
    score = environment.score(task, Transcript(actions[-1], earlier=tuple(actions[:-1]), seed=3))
    assert score.reward == seen[-1].rewards[0]


def test_hex_first_player_wins_from_top_to_bottom():
    environment = make_environment(section("hex"))
    moves = ("a1", "b1", "a2", "b2", "a3", "b3", "a4")
    _, seen = play_out(environment, first_task(environment), moves=moves)
    assert (len(seen), seen[-1].rewards) == (8, (1.0, -1.0))


def test_simultaneous_bids_are_hidden_from_the_other_player():
    environment = make_environment(section("goofspiel"))
    task = first_task(environment)
    session = environment.reset(task, 0)
    before = environment.reset(task, 0).step("1").messages
    session.step("5")
    assert session.observation.player == 1 and session.observation.messages == before
    after = session.step("2")
    assert after.player == 0 and "their hand 1 3 4 5" in after.messages[0]["content"]


def test_cards_depend_on_the_seed_and_differ_between_players():
    environment = make_environment(section("kuhn_poker"))
    task = first_task(environment)
    deals = {seed: play_out(environment, task, seed, moves=("Pass", "Pass"))[1] for seed in range(12)}
    cards = {tuple(view.messages[0]["content"].split()[2] for view in seen[:2]) for seen in deals.values()}
    assert len(cards) > 3 and all(first != second for first, second in cards)
    for seen in deals.values():
        first, second = ("JQK".index(view.messages[0]["content"].split()[2]) for view in seen[:2])
        assert seen[-1].rewards == ((1.0, -1.0) if first > second else (-1.0, 1.0))


@pytest.mark.parametrize(
    ("policy", "move", "rewards"),
    [("loses", "1,1", (1.0, -1.0)), ("loses", "0,0   ", (1.0, -1.0)), ("ends", "1,1", ())],
)
def test_illegal_move_setting_decides_the_rewards(policy, move, rewards):
    environment = make_environment(section("tic_tac_toe", illegal_move=policy))
    session = environment.reset(first_task(environment), 0)
    session.step(" 1,1\n")
    ended = session.step(move)
    assert ended.done and ended.rewards == rewards and ended.metrics["illegal"] == 1.0


def test_mcts_opponent_beats_random_play():
    environment = make_environment(section("tic_tac_toe", opponent="mcts", simulations=60))
    assert environment.players == 1
    worth = [
        play_out(environment, task)[1][-1].rewards[0] for task in islice(environment.tasks("heldout", 0), 12)
    ]
    assert sum(worth) < -6
    lucky = make_environment(section("tic_tac_toe", opponent="random"))
    worth = [play_out(lucky, task)[1][-1].rewards[0] for task in islice(lucky.tasks("heldout", 0), 12)]
    assert max(worth) == 1.0
    seats = {
        lucky.reset(task, 0).observation.messages[0]["content"][8]
        for task in islice(lucky.tasks("train", 0), 9)
    }
    assert seats == {"x", "o"}


@pytest.mark.parametrize(
    ("game", "opponent"),
    [("connect_four", "mcts"), ("tic_tac_toe", "minimax"), ("kuhn_poker", "cfr"), ("gin_rummy", "rules")],
)
def test_games_against_a_teacher_pass_check_environment(game, opponent, tmp_path, monkeypatch):
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path))
    assert not check_environment(section(game, opponent=opponent, simulations=4), tasks=1).findings


def test_random_play_never_beats_the_minimax_opponent(tmp_path, monkeypatch):
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path))
    environment = make_environment(section("tic_tac_toe", opponent="minimax"))
    ends = [play_out(environment, task)[1][-1] for task in islice(environment.tasks("heldout", 0), 20)]
    assert {end.metrics["won"] for end in ends} == {0.0} and min(end.rewards[0] for end in ends) == -1.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"game": "tictactoe"}, "no game 'tictactoe'.*tic_tac_toe"),
        ({"game": "kuhn_poker", "opponent": "mcts"}, "use cfr or random"),
        ({"game": "hex", "config": {"size": 3}}, "environment.config"),
    ],
)
def test_unplayable_sections_are_refused(wrong, message):
    with pytest.raises(RequestError, match=rf"(?s){message}"):
        make_environment({"id": "open_spiel", **wrong})


def test_unfinished_move_counts_as_illegal():
    """If such a game ended without rewards, a losing player would learn to write endless moves."""
    environment = make_environment(section("tic_tac_toe"))
    session = environment.reset(first_task(environment), 0)
    session.step("1,1")
    ended = session.step("0,0", finished=False)
    assert ended.done and ended.rewards == (1.0, -1.0) and ended.metrics["illegal"] == 1.0
    transcript = Transcript("0,0", finished=False, earlier=("1,1",), player=1)
    assert environment.score(first_task(environment), transcript).reward == -1.0
