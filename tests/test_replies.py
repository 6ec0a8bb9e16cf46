"""Strange replies: what is read from their `usage`, `content` and body, and with how much work.

test_servers.py tests what a run does with such replies, its budget and its bill.
"""

import json
from types import SimpleNamespace

import pytest
from annotate import FeedbackError, parse_feedback
from ask import read_answer

GOOD = json.dumps({"reasoning": "Read it.", "textual_feedback": "It is short and clear.",
                   "good_spans": ["a short answer"], "poor_spans": []})
# Values of `usage`, as JSON text; none is a valid report.
USAGES = ["null", "[1, 2]", '"many"', "12", "true", "{}", "[" * 900 + "]" * 900,
          '{"prompt_tokens": 0, "completion_tokens": 0}', '{"completion_tokens": 3}',
          '{"prompt_tokens": 3}', '{"total_tokens": 12}',
          '{"prompt_tokens": 9, "completion_tokens": -9}',
          *[f'{{"prompt_tokens": {text}, "completion_tokens": {text}}}' for text in (
              "null", "true", '"12"', "1.5", "-4", "1e308", "1e999", "NaN", "Infinity",
              "1" + "0" * 400, "9" * 5000, "[1]", "{}", "10000000000")]]
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
BODIES = ["{}", '{"choices": []}', '{"choices": {}}', '{"choices": [null]}', "[]", "5", "null",
          '{"choices": [{}]}', '{"choices": [{"message": null}]}', "<html>", "", "[" * 200_000,
          '{"choices": [{"message": "hi"}]}', '{"choices": [{"mess',
          '{"choices": [{"message": {}, "finish_reason": ["stop"]}]}',
          '{"error": {"message": "no"}}']


def completion(usage: str = '{"prompt_tokens": 40, "completion_tokens": 60}',
               content: str = json.dumps(GOOD)) -> str:
    """A chat completion with a `usage` and a `content`, both as JSON text."""
    return (f'{{"choices": [{{"message": {{"content": {content}}}, "finish_reason": "stop"}}], '
            f'"usage": {usage}}}')


# Name → (body of the answer, whether its `usage` is valid, whether the reply can be used).
KINDS = {f"usage {text[:40]}": (completion(usage=text), False, True) for text in USAGES}
KINDS |= {f"content {name}": (completion(content=text), True, is_usable)
          for name, (text, is_usable) in CONTENTS.items()}
KINDS |= {f"body {text[:40]}": (text, False, False) for text in BODIES}


@pytest.mark.parametrize("kind", KINDS)
def test_a_strange_reply_is_read_or_refused(kind):
    body, is_reported, is_usable = KINDS[kind]
    answer = SimpleNamespace(status_code=200, headers={}, content=body.encode())
    reply = read_answer(answer, 90, 100)
    assert reply.usage == ({"prompt_tokens": 40, "completion_tokens": 60} if is_reported
                           else None)
    try:
        assert is_usable == bool(reply.reason is None and parse_feedback(reply.text))
    except FeedbackError:
        assert not is_usable


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
