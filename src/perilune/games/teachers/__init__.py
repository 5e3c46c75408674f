"""Teachers of games: search, equilibria and perfect play, for data to imitate and as yardsticks."""

from perilune.games.teachers.registry import BEST, GAME_TEACHERS, make_game_teacher
from perilune.games.teachers.teacher import GameTeacher, Move, choose

__all__ = ["BEST", "GAME_TEACHERS", "GameTeacher", "Move", "choose", "make_game_teacher"]
