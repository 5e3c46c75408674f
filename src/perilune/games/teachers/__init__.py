"""Game teachers: search, equilibria and perfect play, as sources of training data and as opponents."""

from perilune.games.teachers.registry import BEST, GAME_TEACHERS, make_game_teacher
from perilune.games.teachers.teacher import EpsilonTeacher, GameTeacher, Move, UniformTeacher, choose

__all__ = [
    "BEST",
    "GAME_TEACHERS",
    "EpsilonTeacher",
    "GameTeacher",
    "Move",
    "UniformTeacher",
    "choose",
    "make_game_teacher",
]
