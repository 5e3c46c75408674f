"""Teachers: who writes training traces, found by name; and how their traces are verified."""

from perilune.data.generators.registry import make_teacher, provenance_of, teacher_names
from perilune.data.generators.scripted import ScriptedTeacher
from perilune.data.generators.teacher import Candidate, Rejected, Teacher, verified, written

__all__ = [
    "Candidate",
    "Rejected",
    "ScriptedTeacher",
    "Teacher",
    "make_teacher",
    "provenance_of",
    "teacher_names",
    "verified",
    "written",
]
