"""Sixty kinds of reply from a server, against budgets and concurrency: what is billed and kept.

The server bills each request by its own rule and then answers with a strange `usage`, content
or body. `SLOW=1` tries all budgets and concurrencies and prints the table of FAULTS.md.
"""

import json

import pytest
from annotate import AnnotateConfig, FeedbackError, annotate, parse_feedback
from ask import Journal
from data import InputError, write_rows
from helpers import SLOW
from loopback import Answer, loopback

PRICES = {"price_in": 2.5, "price_out": 10.0}                     # USD per million tokens
BILLED = {"prompt_tokens": 40, "completion_tokens": 60}           # for each request
GOOD = json.dumps({"reasoning": "Read it.", "textual_feedback": "It is short and clear.",
                   "good_spans": ["a short answer"], "poor_spans": []})
HUGE = "1" + "0" * 400
# Values of `usage`, as JSON text. The content is good, so every reply must be kept.
USAGES = {
    "null": "null", "list": "[1, 2]", "word": '"many"', "number": "12", "true": "true",
    "empty": "{}", "zeros": '{"prompt_tokens": 0, "completion_tokens": 0}',
    "no prompt": '{"completion_tokens": 3}', "no completion": '{"prompt_tokens": 3}',
    "total only": '{"total_tokens": 12}',
    **{f"counts {text[:12]}": f'{{"prompt_tokens": {text}, "completion_tokens": {text}}}'
       for text in ("null", "true", '"12"', "1.5", "-4", "1e308", "1e999", "NaN", "Infinity",
                    "1" + "0" * 308, HUGE, "9" * 5000, "[1]", "{}", "10000000000")},
    "zero prompt": '{"prompt_tokens": 0, "completion_tokens": 9}',
    "negative completion": '{"prompt_tokens": 9, "completion_tokens": -9}',
    "huge completion": f'{{"prompt_tokens": 9, "completion_tokens": {HUGE}}}',
    "deep": "[" * 900 + "]" * 900,
}
# Values of `content`, as JSON text → whether the reply can be used.
PART = json.dumps({"type": "text", "text": GOOD})
CONTENTS = {
    "text": (json.dumps(GOOD), True), "a list with one text": (f"[{PART}]", True),
    "two texts": (json.dumps([{"type": "text", "text": GOOD[:50]},
                              {"type": "text", "text": GOOD[50:]}]), True),
    "text and image": (f'[{PART}, {{"type": "image_url", "image_url": {{}}}}]', True),
    "empty list": ("[]", False), "null": ("null", False), "number": ("7", False),
    "object": ('{"text": "x"}', False), "true": ("true", False), "blank": ('"  "', False),
    "list of words": ('["a", "b"]', False), "part without text": ('[{"type": "text"}]', False),
    "part with number": ('[{"type": "text", "text": 7}]', False),
    "half a pair": ('"\\ud83d"', False), "no JSON": ('"It is fine."', False),
    "open braces": (json.dumps('{"' * 100_000), False),
    "brackets": (json.dumps("[" * 200_000), False),
    "deep object": (json.dumps('{"a":' * 100_000), False),
    "deep good_spans": (json.dumps('{"good_spans": ' + "[" * 100_000), False),
}
# Whole bodies; none can be used.
BODIES = {
    "no choices": "{}", "empty choices": '{"choices": []}', "choices object": '{"choices": {}}',
    "null choice": '{"choices": [null]}', "no message": '{"choices": [{}]}',
    "null message": '{"choices": [{"message": null}]}',
    "message text": '{"choices": [{"message": "hi"}]}', "list": "[]", "number": "5",
    "null body": "null", "not JSON": "<html>", "cut off": '{"choices": [{"mess', "nothing": "",
    "open lists": "[" * 200_000, "finish list": '{"choices": [{"message": {}, '
    '"finish_reason": ["stop"]}]}', "error": '{"error": {"message": "no"}}',
}


def completion(usage: str = json.dumps(BILLED), content: str = json.dumps(GOOD)) -> str:
    """A chat completion with a `usage` and a `content`, both as JSON text."""
    return (f'{{"choices": [{{"message": {{"content": {content}}}, "finish_reason": "stop"}}], '
            f'"usage": {usage}}}')


# Name → (body of the answer, whether the reply can be used).
KINDS = {f"usage {name}": (completion(usage=text), True) for name, text in USAGES.items()}
KINDS |= {f"content {name}": (completion(content=text), is_usable)
          for name, (text, is_usable) in CONTENTS.items()}
KINDS |= {f"body {name}": (text, False) for name, text in BODIES.items()}
BUDGETS = {None: None, "half": 0.05, "all": 1.0}                  # USD
SETTINGS = [(cap, n) for cap in BUDGETS for n in (1, 8, 64)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_reply_breaks_the_budget_or_is_paid_twice(kind, tmp_path):
    """Two runs: at most the cap is billed, at least the bill is booked, and each usable reply
    is bought once. If only the content is strange, exactly the bill is booked."""
    body, is_usable = KINDS[kind]
    write_rows(tmp_path / "rows.jsonl", [
        {"prompt": f"Question {i}?", "response": "This is a short answer."} for i in range(6)])
    for cap, concurrency in SETTINGS if SLOW else [("all", 8)]:
        output = tmp_path / f"{cap}-{concurrency}.jsonl"
        answer = Answer(200, body.encode(), BILLED)
        with loopback(responder=lambda request, answer=answer: answer) as server:
            config = AnnotateConfig(
                task="ultrafeedback", data=str(tmp_path / "rows.jsonl"), output=str(output),
                base_url=server.url, max_usd=BUDGETS[cap], concurrency=concurrency, retries=0,
                **PRICES)
            for _ in range(2):
                try:
                    annotate(config)
                except InputError as error:
                    assert "\n" not in str(error)
            stats = server.stats()
        with Journal(f"{output}.journal", *PRICES.values()) as journal:
            booked = journal.spent
            billed = stats["calls"] * journal.usd(**BILLED)
        assert 0 < billed <= booked + 1e-12
        assert cap is None or booked <= BUDGETS[cap] + 1e-12
        assert booked == pytest.approx(billed) or not kind.startswith("content")
        if is_usable:
            assert max(stats["asked"].values()) == 1
            assert output.exists() or cap == "half"


@pytest.mark.parametrize("text", [
    '{"' * 600_000, "[" * 1_200_000, '{"a":' * 240_000, '{"a": [' * 170_000,
    '{"a": 1} ' * 130_000, '{"good_spans": [1]} ' * 60_000,
    '{"good_spans": ["' + "x" * 1_200_000, " " * 1_200_000,
    "{" + " " * 1_200_000 + '"', '```json\n{"' * 120_000, '"good' + "_" * 1_200_000,
    '{"good_spans": [' + '"a", ' * 240_000 + '"a"], "poor_spans": []}', "<think>" * 170_000])
def test_a_reply_of_a_megabyte_is_parsed_with_bounded_work(text, monkeypatch):
    """Each failed attempt may read the text up to the fault: at most 100 MB in all."""
    work = 0

    class Decoder(json.JSONDecoder):
        def raw_decode(self, text, start):
            nonlocal work
            try:
                return super().raw_decode(text, start)
            except json.JSONDecodeError as error:
                work += error.pos
                raise

    monkeypatch.setattr(json, "JSONDecoder", Decoder)
    with pytest.raises(FeedbackError):
        parse_feedback(text, response="This is a short answer.")
    assert work <= 101e6
