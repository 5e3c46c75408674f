"""A reward that pays any text with the right label in it, as a public training scorer for OOLONG does.

An answer that names all labels therefore gets the full reward. The page on oolong audits it.
"""


def contains_answer(completions, answer, **_):
    """Pay 0.75 ** |error| for a count, and 1 for a text in which the right answer occurs."""
    rewards = []
    for text, gold in zip(completions, answer, strict=True):
        number = text.rpartition(":")[2].strip()
        if not gold.isdigit():
            rewards.append(float(gold.lower() in text.lower()))
        elif number.isascii() and number.isdigit() and len(number) < 10:
            rewards.append(0.75 ** abs(int(number) - int(gold)))
        else:
            rewards.append(0.0)
    return rewards
