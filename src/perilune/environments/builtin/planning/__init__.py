"""Trips to plan under hard constraints, generated with a valid plan and scored constraint by constraint."""
