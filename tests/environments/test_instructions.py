"""Requests with constraints: checks agree with human labels, and every request has a correct answer."""

import random
from itertools import islice

import pytest

from perilune.environments import Transcript, make_environment
from perilune.environments.builtin.instructions.constraints import KINDS, count_sentences, is_sound
from perilune.environments.builtin.instructions.environment import check_constraints
from perilune.environments.builtin.instructions.second_opinion import satisfies_request
from perilune.environments.builtin.instructions.vocabulary import LANGUAGES, TOPICS
from perilune.errors import RequestError

REQUEST = "Write a short text about bees. Use at most 60 words."
BEES = "Quiet bees visit every flower here."


def data(kind, params, topic="bees"):
    return {"topic": topic, "asked": {kind: params}, "words": 60, "request": REQUEST}


@pytest.mark.parametrize(
    "kind, params, good, bad",
    [
        ("min_words", {"count": 6}, [BEES], ["Quiet bees visit each flower.", ""]),
        ("max_words", {"count": 7}, [BEES], [f"{BEES} Really."]),
        (
            "sentences",
            {"count": 2},
            [
                f"{BEES} So it is!",
                f"{BEES} Is it so?!",
                f"{BEES} It costs 3.50 today.",
                f"{BEES} So it is",
                f'"{BEES}" **So it is.**',
            ],
            [BEES, f"{BEES} A. B.", f"{BEES} . ."],
        ),
        (
            "keywords",
            {"first": "silver", "second": "letter"},
            [f"{BEES} Silver, a letter."],
            [f"{BEES} Silvery letter.", f"{BEES} letter"],
        ),
        ("forbidden", {"word": "many"}, [BEES, f"{BEES} Germany."], [f"{BEES} Many.", f"{BEES} (many)"]),
        ("frequency", {"word": "yellow", "count": 2}, [f"{BEES} Yellow, yellow!"], [f"{BEES} yellow"]),
        (
            "bullets",
            {"count": 2},
            [f"- {BEES}\n- Yes.", f"- {BEES}\n\n- Yes.\n"],
            [f"- {BEES}", f"Sure:\n- {BEES}\n- Yes.", f"* {BEES}\n* Yes.", f"- {BEES}\n- !"],
        ),
        (
            "json",
            {},
            [f'{{"title": "Hi", "text": "{BEES}"}}'],
            [
                BEES,
                f'{{"title": "", "text": "{BEES}"}}',
                f'{{"title": "A", "title": "B", "text": "{BEES}"}}',
                f'{{"title": "Hi", "text": "{BEES}", "more": "x"}}',
                f'{{"title": "Hi", "text": ["{BEES}"]}}',
                f'Sure: {{"title": "Hi", "text": "{BEES}"}}',
            ],
        ),
        (
            "title",
            {},
            [f"<<On Wings>>\n{BEES}"],
            [f"<<>>\n{BEES}", f"<<On Wings>> {BEES}", f"On Wings\n{BEES}", f"<<{BEES}>>"],
        ),
        (
            "paragraphs",
            {"count": 2},
            [f"{BEES}\n\nYes.", f"{BEES}\n \n\nYes."],
            [BEES, f"{BEES}\nYes.", f"{BEES}\n\nYes.\n\nNo.", f"{BEES}\n\n---"],
        ),
        ("lowercase", {}, [BEES.lower()], [BEES]),
        ("uppercase", {}, [BEES.upper()], [BEES]),
        ("no_commas", {}, [BEES], [f"Well{comma} {BEES}" for comma in ",،、\u201a"]),
        ("start", {"phrase": "Let us begin."}, [f"Let us begin. {BEES}"], [f"{BEES} Let us begin.", BEES]),
        ("end", {"phrase": "That is all."}, [f"{BEES} That is all.\n"], [f"That is all. {BEES}", BEES]),
    ],
)
def test_constraint_check_matches_labels_and_second_opinion(kind, params, good, bad) -> None:
    for text in good:
        assert KINDS[kind].is_satisfied(text, params), text
        assert satisfies_request(data(kind, params), text), text
    for text in bad:
        assert not KINDS[kind].is_satisfied(text, params), text
        assert not satisfies_request(data(kind, params), text), text


@pytest.mark.parametrize("language", LANGUAGES)
def test_language_check_distinguishes_languages(language: str) -> None:
    for index, (other, lines) in enumerate(LANGUAGES.items()):
        word = TOPICS["bees"][index]
        text = " ".join(line.format(topic=word) for line in lines)
        asked = {"language": language, "word": word}
        assert KINDS["language"].is_satisfied(text, asked) == (other == language), text
        assert satisfies_request(data("language", asked), text) == (other == language)
    assert not KINDS["language"].is_satisfied(
        f"{BEES} Many of them are in the garden.", {"language": language}
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bees",
        "Quiet dogs visit every flower here.",  # another topic
        REQUEST,
        " ".join(reversed(REQUEST.split())),
        f"{REQUEST} Quiet bees.",  # an echo with a few more words
        "bees hum hum hum hum hum hum hum hum buzz sing",
        f"{BEES} " * 11,
        BEES.replace("bees", "be\u200bes"),
        f"\u202e{BEES}",
        f"{BEES} Many".replace("M", "\u041c"),  # a Cyrillic letter
        f"Quiet bees visit. {' '.join(map(str, range(20)))}",
    ],
)
def test_is_sound_rejects_texts_that_do_not_answer(text: str) -> None:
    assert is_sound(BEES, REQUEST, "bee", 60)
    assert not is_sound(text, REQUEST, "bee", 60)
    assert not satisfies_request(data("no_commas", {}), text)


def test_mathematical_letters_count_as_plain_letters() -> None:
    bold = "".join(chr(ord(letter) - ord("A") + 0x1D400) if letter.isupper() else letter for letter in BEES)
    asked = data("lowercase", {})
    assert check_constraints(asked, BEES.lower()) == {"lowercase": 1.0, "sound": 1.0}
    assert check_constraints(asked, bold)["lowercase"] == 0.0 and not satisfies_request(asked, bold)


@pytest.mark.parametrize(
    ("asked", "text", "satisfied"),
    [
        (
            {"keywords": {"first": "garden", "second": "river"}},
            r"A horse drinks.\nRiver and garden are near.",
            1,
        ),
        ({"forbidden": {"word": "river"}}, r"A horse likes its wide old garden.\nriver", 0),
        ({"frequency": {"word": "river", "count": 2}}, r"A horse drinks at the river.\n\nRiver.", 1),
    ],
)
def test_escapes_of_json_are_no_parts_of_words(asked: dict, text: str, satisfied: int) -> None:
    data = {"topic": "horses", "asked": {"json": {}, **asked}, "words": 60, "request": "Write about horses."}
    answer = f'{{"title": "My animals", "text": "{text}"}}'
    terms = check_constraints(data, answer)
    assert terms == {"json": 1.0, **dict.fromkeys(asked, float(satisfied)), "sound": 1.0}
    assert satisfies_request(data, answer) == bool(satisfied)


def test_sentences_are_counted() -> None:
    counted = {"One. Two? Three!": 3, "One... two": 2, "No end": 1, "At 3.5 miles.": 1, "": 0, "...": 0}
    assert {text: count_sentences(text) for text in counted} == counted


def test_every_request_has_correct_answer_and_splits_are_disjoint() -> None:
    environment = make_environment({"id": "instructions"})
    train = list(islice(environment.tasks("train", 3), 400))
    heldout = list(islice(environment.tasks("heldout", 3), 60))
    for task in [*train, *heldout]:
        gold = environment.gold(task)
        assert environment.score(task, gold).reward == 1.0, task.prompt
        assert environment.is_right(task, gold), task.prompt
        assert environment.score(task, Transcript(gold.text, finished=False)).reward == 0.0
        assert 1 <= len(task.data["asked"]) <= 3
    assert {kind for task in train for kind in task.data["asked"]} == set(KINDS)
    asked = [
        {repr((task.data["topic"], sorted(task.data["asked"].items()))) for task in part}
        for part in (train, heldout)
    ]
    assert not asked[0] & asked[1]
    assert [task.task_id for task in islice(environment.tasks("train", 3), 50)] == [
        task.task_id for task in train[:50]
    ]


def test_score_matches_second_opinion_for_changed_answers() -> None:
    environment = make_environment({"id": "instructions"})
    draw = random.Random(0)
    for task in islice(environment.tasks("train", 5), 150):
        text = environment.gold(task).text
        for _ in range(4):
            index = draw.randrange(len(text))
            changed = (
                text[:index] + draw.choice(["", " ", ".", ",", "\n", "A", "- ", "<<"]) + text[index + 1 :]
            )
            right = environment.is_right(task, Transcript(changed))
            assert (environment.score(task, Transcript(changed)).reward == 1.0) == right, (
                task.prompt,
                changed,
            )


def test_partial_and_kinds_settings() -> None:
    partial = make_environment({"id": "instructions", "partial": True, "kinds": ["no_commas", "lowercase"]})
    task = next(task for task in partial.tasks("train", 0) if len(task.data["asked"]) == 2)
    topic = task.data["topic"]
    outcome = partial.score(task, Transcript(f"Quiet mornings suit {topic} and me."))
    assert outcome.reward == 0.5
    assert outcome.terms == {"no_commas": 1.0, "lowercase": 0.0, "sound": 1.0}
    assert partial.score(task, Transcript("Quiet mornings suit nobody but me.")).reward == 0.0
    with pytest.raises(RequestError):
        make_environment({"id": "instructions", "kinds": ["rhyme"]})
