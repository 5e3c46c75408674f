"""Teachers, which write training traces, and the verification of their traces."""

from perilune.data.generators.registry import make_teacher, provenance_of, teacher_names
from perilune.data.generators.scripted import ScriptedTeacher
from perilune.data.generators.teacher import (
    Candidate,
    Rejected,
    Teacher,
    teacher_candidates,
    verify_candidates,
)

__all__ = [
    "Candidate",
    "Rejected",
    "ScriptedTeacher",
    "Teacher",
    "make_teacher",
    "provenance_of",
    "teacher_candidates",
    "teacher_names",
    "verify_candidates",
]
