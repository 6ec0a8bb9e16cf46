"""A task of your own: one sentence that announces an event. Its critic quotes phrases.

    PYTHONPATH=notebooks/own_task python text2grad.py --task events:EVENT
"""

import re
from random import Random

from data import Task

FACTS = dict(line.split(": ") for line in """\
event: chess evening, book club, yoga class, jazz concert, film night, plant swap, quiz night
day: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday
time: 9:30, 10:00, 14:15, 16:45, 18:00, 19:30, 20:15
place: the old library, the town hall, the school garden, the harbour café, the market square
price: free, 2 euros, 3 euros, 5 euros, 8 euros, 12 euros""".splitlines())
# What a sentence may have between the facts. All other words are an invention, or a label.
KNOWN = re.compile(r"""(?xi) (?: \s* (?: [|,.;!"?] | \b (?: an?|and|are|at|be|by|come|costs?|
    entrance|euros|event|fee|for|from|held|hosted|in|is|it|join|of|on|our|place|price|starts?|
    takes?|the|there|this|to|us|we|will|with|you|invited?|tickets?|announced|scheduled|begins|
    time|day|located|where|that) \b (?!:) ) )+ \s*""")


def make_rows(split: str, n: int, seed: int) -> list[dict]:
    """n events. The splits have other seeds."""
    draw = Random(f"{split}-{seed}")
    return [{name: draw.choice(values.split(", ")) for name, values in FACTS.items()}
            for _ in range(n)]


def critic(row: dict, response: str) -> dict:
    """A fact of the row is good, with the word before it. Other phrases are poor.

    All after the first sentence is one poor quote. A missing fact is only named.
    """
    sentence = re.match(r"(?s).*?([.!?](?=\s)|\n|\Z)", response)[0]
    poor = [response[len(sentence) :]]
    good = []
    said = []
    for name in FACTS:
        found = re.search(rf"(?i)(\w+ )?\b{re.escape(row[name])}\b", sentence)
        if found:
            good.append(found[0])
            sentence = sentence.replace(found[0], "|")
        else:
            said.append(f"The {name} is missing.")
    poor = [quote for quote in KNOWN.split(sentence) + poor if quote.strip()]
    said += [f"{quote!r} is not in the row." for quote in poor]
    return {"critique": " ".join(said) or "All is there.", "good_spans": good,
            "poor_spans": poor}


EVENT = Task(
    "events", lambda row: (
        "Write one sentence that announces this event. State each fact below and add nothing."
        "\n\n" + "\n".join(f"{name}: {row[name]}" for name in FACTS)),
    tuple(FACTS), rows=make_rows,
    settings={"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "critic": "annotator",
              "annotator_function": "events:critic"})
