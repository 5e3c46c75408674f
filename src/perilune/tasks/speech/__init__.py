"""Trains a small voice: utterances of a teacher, a codec, a talker, and what a recogniser hears of it."""
