"""An own task: one sentence that announces an event. Its critic quotes whole phrases.

    cd notebooks/own_task && python events.py          # writes events.jsonl: 180 rows
"""

import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data import Task, write_rows  # noqa: E402

FIELDS = ("event", "day", "time", "place", "price")
VALUES = {
    "event": ("chess evening", "book club", "yoga class", "jazz concert", "repair café",
              "pottery workshop", "film night", "plant swap", "quiz night", "choir rehearsal",
              "cooking course", "flea market", "poetry reading", "sewing circle"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "time": ("9:30", "10:00", "14:15", "16:45", "18:00", "19:30", "20:15"),
    "place": ("the old library", "the town hall", "the school garden", "the harbour café",
              "the sports centre", "the church hall", "the market square"),
    "price": ("free", "2 euros", "3 euros", "5 euros", "8 euros", "12 euros"),
}


def make_rows(split: str, n: int, seed: int) -> list[dict]:
    """n events, drawn independently. The splits have other seeds."""
    draw = random.Random(f"{split}-{seed}")
    return [{"id": f"{split}-{seed}-{i}"} | {name: draw.choice(VALUES[name]) for name in FIELDS}
            for i in range(n)]


EVENT = Task(
    name="events",
    policy_prompt=lambda row: (
        "Write one sentence that announces this event. State each fact below and add nothing."
        "\n\n" + "\n".join(f"{name}: {row[name]}" for name in FIELDS)),
    needs=FIELDS,
    annotator_role="You are the editor of a town's calendar of events.",
    criteria="whether the sentence states the event, day, time, place and price, and nothing "
             "that the row does not say",
)

KNOWN_WORDS = set("""
a an and are at be by come costs cost entrance entry euros event fee for from held hosted
in is it join on of o'clock our place price priced starting starts takes the this there to
us we will with you invited invite invites hold holding free attend ticket tickets
announced announce announces announcing happening scheduled starts beginning begins time
day located where which that
""".split())


def critic(row: dict, response: str) -> dict:
    """Quote phrases: each fact with the word before it is good, each run of other words poor.

    All after the first sentence or line is one poor quote. A fact counts once. A label such as
    "day:" belongs to a list and not to a sentence, so it is poor.
    """
    end = re.search(r"[.!?](?=\s+\S)|\n", response)
    sentence = response[: end.start()] if end else response
    rest = response[len(sentence):].lstrip(".!? \n")
    good, poor, said = [], [], []
    covered = []                                   # [start, end) of each good phrase
    for name in FIELDS:
        found = re.search(rf"(?i)(\w+ )?\b{re.escape(row[name])}\b", sentence)
        if found:
            good.append(found[0])
            covered.append(found.span())
        else:
            said.append(f"The {name} ({row[name]}) is missing.")
    run = []
    for word in [*re.finditer(r"[^\s,;.!?\"]+", sentence), None]:
        is_poor = word and not any(a <= word.start() < b for a, b in covered) and (
            word[0].lower().strip("'()*-–") not in KNOWN_WORDS)
        if is_poor:
            run.append(word)
        elif run:
            quote = sentence[run[0].start() : run[-1].end()]
            poor.append(quote)
            said.append(f"\"{quote}\" is not in the row.")
            run = []
    if rest:
        poor.append(rest)
        said.append("Only one sentence was asked for.")
    return {"critique": " ".join(said) or "It states every fact and nothing else.",
            "good_spans": good, "poor_spans": poor}


if __name__ == "__main__":
    write_rows("events.jsonl", make_rows("train", 180, 0))
