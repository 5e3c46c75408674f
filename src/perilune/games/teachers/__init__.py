"""Game teachers: search, equilibria and perfect play, as sources of training data and as opponents."""

from perilune.games.teachers.registry import BEST_TEACHERS, GAME_TEACHERS, make_game_teacher
from perilune.games.teachers.teacher import EpsilonTeacher, GameTeacher, Move, UniformTeacher, choose_move

__all__ = [
    "BEST_TEACHERS",
    "GAME_TEACHERS",
    "EpsilonTeacher",
    "GameTeacher",
    "Move",
    "UniformTeacher",
    "choose_move",
    "make_game_teacher",
]
