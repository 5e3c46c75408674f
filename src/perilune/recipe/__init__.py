"""Recipes: from a YAML file to validated stages and their jobs."""
