"""Exercises that check themselves: the reader's code is run against a small made-up world, and told what *it* does
differently. A chapter has a module or several; importing one registers its checks."""

from helpers.lab.exercises import chapter_00, chapter_01_collate, chapter_01_shares, chapter_01_workers
from helpers.lab.exercises.framework import CHECKS, Mistake, check, exercise
from helpers.lab.exercises.worlds import FakeTime, loader_process

__all__ = [
    "CHECKS",
    "FakeTime",
    "Mistake",
    "chapter_00",
    "chapter_01_collate",
    "chapter_01_shares",
    "chapter_01_workers",
    "check",
    "exercise",
    "loader_process",
]
