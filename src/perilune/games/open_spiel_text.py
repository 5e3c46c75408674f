"""Texts of OpenSpiel's games: rules, moves and the state from the player's point of view.

A game without an entry here uses OpenSpiel's own text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

View = Callable[[Any, int], str]
"""Takes a state and a player; returns the text that the player sees."""

_RANKS = "JQK"
_PREFIX = re.compile(r"\[P\d+\]Bid: |Player: \d+ Action: ")
_GIN_FACT = re.compile(r"(Knock card|Phase|Stock size|Upcard|Discard pile): *([^\n:]*?)(?=  |\n|$)")
_MARKED_MOVE = re.compile(r"[xo]\(?([\d,]+)\)?")  # the player's mark, and a cell or column


@dataclass(frozen=True, slots=True)
class GameText:
    """The texts of a game: its rules, and the view of a state."""

    rules: str
    view: View


def move_text(state: Any, player: int, action: int) -> str:
    text = _PREFIX.sub("", state.action_to_string(player, action)).strip()
    marked = _MARKED_MOVE.fullmatch(text)
    return marked[1] if marked else text


def game_text(game: Any) -> GameText:
    kind = game.get_type()
    return _TEXTS.get(kind.short_name) or GameText(f"You play {kind.long_name}.", _observe)


def _observe(state: Any, player: int) -> str:
    kind = state.get_game().get_type()
    imperfect = kind.provides_information_state_string and not kind.provides_observation_string
    text = state.information_state_string(player) if imperfect else state.observation_string(player)
    return str(text).strip("\n")


def _board_view(marks: str, *, head: int = 0, below: str = "") -> View:
    """Return a view with the player's mark and the printed board, without its first `head` lines."""

    def view(state: Any, player: int) -> str:
        lines = [line.rstrip() for line in _observe(state, player).splitlines()][head:]
        return "\n".join([f"you are {marks[player]}", *lines, *([below] if below else [])])

    return view


def _view_goofspiel(state: Any, player: int) -> str:
    text = _observe(state, player)
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if "Current point card" not in facts or state.num_players() != 2:  # bids are hidden
        return text
    points, their_points = (facts["Points"].split()[seat] for seat in (player, 1 - player))
    return (
        f"prize {facts['Current point card'].strip()}\nyour hand {facts[f'P{player} hand'].strip()}\n"
        f"their hand {facts[f'P{1 - player} hand'].strip()}\npoints {points}, theirs {their_points}"
    )


def _view_kuhn(state: Any, player: int) -> str:
    card, *moves = state.information_state_string(player)
    return (
        f"your card {_RANKS[int(card)]}\nso far {' '.join('Bet' if act == 'b' else 'Pass' for act in moves)}"
    )


def _view_leduc(state: Any, player: int) -> str:
    facts = dict(re.findall(r"\[(\w+): ?([^\]]*)\]", state.information_state_string(player)))
    money = facts["Money"].split()
    public = f", on the table {_name_leduc_card(facts['Public'])}" if "Public" in facts else ""
    rounds = [facts[name].split() for name in ("Round1", "Round2") if name in facts]
    bets = "; ".join(" ".join(("Fold", "Call", "Raise")[int(move)] for move in moves) for moves in rounds)
    return (
        f"your card {_name_leduc_card(facts['Private'])}{public}\npot {facts['Pot']}, your money"
        f" {money[player]}, theirs {money[1 - player]}\nso far {bets}"
    )


def _name_leduc_card(number: str) -> str:
    return _RANKS[int(number) // 2]


def _view_liars_dice(state: Any, player: int) -> str:
    dice, *bids = state.information_state_string(player).split()
    return f"your dice {' '.join(dice)}\nbids {' '.join(bids)}"


def _view_gin_rummy(state: Any, player: int) -> str:
    text = _observe(state, player)
    facts = dict(_GIN_FACT.findall(text))
    section = text.split(f"Player{player}:")[1].split("Player1:")[0]
    deadwood = re.search(r"Deadwood=(\d+)", section)
    return (
        f"your hand {' '.join(re.findall('[A2-9TJQK][scdh]', section))}\n"
        f"deadwood {deadwood[1] if deadwood else '?'}, knock with {facts['Knock card']} or less\n"
        f"phase {facts['Phase']}, upcard {facts['Upcard']}, stock {facts['Stock size']}\n"
        f"discarded {facts.get('Discard pile', '')}"
    )


_TEXTS = {
    "tic_tac_toe": GameText(
        "Tic-tac-toe. Three in a row, column or diagonal win. A move is row,column from 0.", _board_view("xo")
    ),
    "connect_four": GameText(
        "Connect Four. Drop a disc into a column; four in a line win. A move is a column from 0 to 6.",
        _board_view("xo", below="0123456"),
    ),
    "othello": GameText(
        "Othello. Enclose the other's discs in a line to turn them over; who has more at the end wins.",
        _board_view("xo", head=1),
    ),
    "hex": GameText(
        "Hex. Each row lies half a cell further right. x connects the top with the bottom, o the left with"
        " the right. A move is column and row, a1 at the top left.",
        _board_view("xo"),
    ),
    "clobber": GameText(
        "Clobber. Move a piece onto a neighboring piece of the other player, which is removed; who cannot"
        " move loses. A move is from and to: a1a2.",
        _board_view("ox"),
    ),
    "kuhn_poker": GameText(
        "Kuhn poker. Cards J, Q and K, one each; each pays 1. Bet adds 1; Pass checks, or folds to a bet. The"
        " higher card wins.",
        _view_kuhn,
    ),
    "leduc_poker": GameText(
        "Leduc poker. Two each of J, Q and K; each pays 1 and gets a card. Two rounds of bets, with raises of"
        " 2 and 4, a card on the table between them. A pair with it wins, else the higher card.",
        _view_leduc,
    ),
    "liars_dice": GameText(
        "Liar's dice. Bid how many dice of all players show a face: 2-5 is two fives, and sixes count as any"
        " face. Each bid is higher than the last. Liar doubts it: who is wrong loses.",
        _view_liars_dice,
    ),
    "goofspiel": GameText(
        "Goofspiel. All bid a card of their hand at the same time; the highest wins the prize, of equal ones"
        " nobody does. Most points win.",
        _view_goofspiel,
    ),
    "gin_rummy": GameText(
        "Gin rummy. Draw and discard to make sets and runs of three or more; cards in none are deadwood."
        " Knock when it is little enough: who has less wins.",
        _view_gin_rummy,
    ),
}
