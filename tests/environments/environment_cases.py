"""Environment sections that several tests use."""

ADDITION = {
    "id": "reasoning_gym",
    "task": "basic_arithmetic",
    "config": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 3,
        "max_digits": 3,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
    },
    "prompt": "compact",
}


def gym(task, **fields):
    return {"id": "reasoning_gym", "task": task, **fields}
