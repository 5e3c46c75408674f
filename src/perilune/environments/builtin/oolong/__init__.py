"""Aggregation tasks over long contexts, after OOLONG: generated offline, at any length."""
