"""Stages that train a small voice: a teacher's utterances, a codec, a talker, and their evaluation."""
