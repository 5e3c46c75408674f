"""The words that requests and right answers are made of."""

from collections.abc import Mapping, Sequence

REQUESTS = (
    "Write a short text about {topic}.",
    "Tell a friend something about {topic}.",
    "Describe {topic} to somebody who knows nothing of the subject.",
    "Write a note about {topic} for a school newspaper.",
    "Write the opening of a talk on {topic}.",
    "Write a diary entry that mentions {topic}.",
    "Write an advertisement that has to do with {topic}.",
    "Give your opinion on {topic}.",
    "Write a very short story about {topic}.",
    "Summarize what you know about {topic}.",
)
SENTENCES = (
    "Many people like to think of {topic} in quiet moments.",
    "A good day can begin with {topic}.",
    "My neighbor told me a story about {topic} last week.",
    "Children often ask clever questions about {topic}.",
    "We learned a lot about {topic} at school.",
    "You can find {topic} in famous songs as well as in films.",
    "Nobody in our town forgets {topic} for long.",
    "There are countless ways to enjoy {topic}.",
    "Some writers fill whole chapters with {topic}.",
    "A small museum nearby shows pictures of {topic}.",
)
TOPICS: Mapping[str, Sequence[str]] = {  # in English, and in the order of LANGUAGES
    "bees": ("Bienen", "abeilles", "abejas", "api", "пчёлы"),
    "bicycles": ("Fahrräder", "vélos", "bicicletas", "biciclette", "велосипеды"),
    "books": ("Bücher", "livres", "libros", "libri", "книги"),
    "bread": ("Brot", "pain", "pan", "pane", "хлеб"),
    "bridges": ("Brücken", "ponts", "puentes", "ponti", "мосты"),
    "cats": ("Katzen", "chats", "gatos", "gatti", "кошки"),
    "cheese": ("Käse", "fromage", "queso", "formaggio", "сыр"),
    "chess": ("Schach", "échecs", "ajedrez", "scacchi", "шахматы"),
    "clocks": ("Uhren", "horloges", "relojes", "orologi", "часы"),
    "coffee": ("Kaffee", "café", "café", "caffè", "кофе"),
    "dogs": ("Hunde", "chiens", "perros", "cani", "собаки"),
    "forests": ("Wälder", "forêts", "bosques", "foreste", "леса"),
    "friendship": ("Freundschaft", "amitié", "amistad", "amicizia", "дружба"),
    "gardens": ("Gärten", "jardins", "jardines", "giardini", "сады"),
    "mountains": ("Berge", "montagnes", "montañas", "montagne", "горы"),
    "music": ("Musik", "musique", "música", "musica", "музыка"),
    "rain": ("Regen", "pluie", "lluvia", "pioggia", "дождь"),
    "rivers": ("Flüsse", "rivières", "ríos", "fiumi", "реки"),
    "sleep": ("Schlaf", "sommeil", "sueño", "sonno", "сон"),
    "stars": ("Sterne", "étoiles", "estrellas", "stelle", "звёзды"),
    "trains": ("Züge", "trains", "trenes", "treni", "поезда"),
    "volcanoes": ("Vulkane", "volcans", "volcanes", "vulcani", "вулканы"),
    "whales": ("Wale", "baleines", "ballenas", "balene", "киты"),
    "winter": ("Winter", "hiver", "invierno", "inverno", "зима"),
}
LANGUAGES: Mapping[str, Sequence[str]] = {  # with sentences for right answers
    "German": (
        "Das Thema {topic} ist für viele Menschen wichtig.",
        "In der Schule haben wir viel über das Wort {topic} gelernt.",
        "Ich denke oft an {topic} und an die Zeit mit der Familie.",
    ),
    "French": (
        "Le mot {topic} est important pour beaucoup de gens.",
        "Dans les livres on trouve souvent le mot {topic} et des images.",
        "Je pense que le sujet {topic} est dans toutes les villes.",
    ),
    "Spanish": (
        "El tema {topic} es importante para los niños de la ciudad.",
        "En la escuela hablamos mucho de la palabra {topic}.",
        "Mi abuela cuenta una historia que tiene la palabra {topic} en el título.",
    ),
    "Italian": (
        "Il tema {topic} è importante per molte persone della città.",
        "Nella scuola abbiamo parlato della parola {topic} con gli amici.",
        "Mia nonna racconta una storia che ha la parola {topic} nel titolo.",
    ),
    "Russian": (
        "Многие люди часто думают о теме {topic}.",
        "В нашей школе дети спрашивали про слово {topic}.",
        "Моя бабушка рассказала историю про {topic}.",
    ),
}
# Frequent words that a text in the language cannot do without. Russian is recognized by its letters.
FUNCTION_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(words.split())
    for language, words in {
        "English": "the of and to in is that it for was on are with as be this have from you they not at my",
        "German": "der die das und ist nicht ein eine zu den mit von für auf dem des wir ich über oft an",
        "French": "le les des est et une dans que pour qui pas du au sur je nous ce il elle on souvent",
        "Spanish": "el los las de que y en es por con para del una no se su mi tiene mucho como más",
        "Italian": "il di che è per della nel con gli non sono una delle nella mia ha ma più molto anche",
    }.items()
}
KEYWORDS = (
    *("promise", "yellow", "kitchen", "holiday", "letter", "window"),
    *("market", "silver", "teacher", "island", "pocket", "ticket"),
)
AVOIDED = ("many", "people", "good", "about", "can", "you", "some", "often", "we", "there")
OPENINGS = ("Let us begin.", "Listen closely.", "Here is my answer.", "This is worth knowing.")
CLOSINGS = ("That is all.", "Now you know.", "Thank you for reading.", "More on that tomorrow.")
