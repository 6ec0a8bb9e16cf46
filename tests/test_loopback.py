"""The loopback server does what it says, spoken to by the real client:
else annotation's tests prove nothing."""

from contextlib import suppress

import openai
import pytest
from openai import OpenAI

from annotate import ground, parse_feedback
from loopback import REPORTS, loopback, prompt_tokens, tokens

RESPONSE = "Héllo there, the plot of the film is told well but the name of the “hero” is wrong."


def messages(response=RESPONSE):
    return [{"role": "system", "content": "Judge."}, {"role": "user", "content": (
        f"<request>\nSum up.\n</request>\n\n<response>\n{response}\n</response>")}]


def ask(server, response=RESPONSE, key="sk-loopback", retries=0, timeout=10, **options):
    with OpenAI(base_url=server.url, api_key=key, max_retries=retries, timeout=timeout) as one:
        return one.chat.completions.create(**{"model": "m", "messages": messages(response),
                                              **options})


# ── Replies and the bill

@pytest.mark.parametrize("response", [RESPONSE, "one", "a b a b a b",
                                      "Zeile\r\nzwei \t drei " * 3 + "Ende 🎉"])
def test_the_critique_is_readable_and_every_quote_is_found(response):
    with loopback() as server:
        text = ask(server, response).choices[0].message.content
    grounding, feedback = ground(response, parse_feedback(text)), parse_feedback(text)
    assert not grounding.unmatched and not grounding.ambiguous
    assert (len(grounding.spans) == len(feedback.good_spans + feedback.poor_spans)
            >= (" b" not in response))


@pytest.mark.parametrize("counting", ["quarters", "pieces"])
def test_the_bill_is_the_stated_count_of_what_was_sent(counting):
    with loopback(counting=counting) as server:
        replies = [ask(server, f"{RESPONSE} {k}") for k in range(3)]
        stats = server.stats()
        short = ask(server, max_tokens=5)
    for k, reply in enumerate(replies):
        assert reply.usage.prompt_tokens == prompt_tokens(messages(f"{RESPONSE} {k}"), counting)
        assert reply.usage.completion_tokens == tokens(reply.choices[0].message.content,
                                                       counting)
    assert stats["prompt_tokens"] == sum(reply.usage.prompt_tokens for reply in replies)
    assert stats["completion_tokens"] == sum(reply.usage.completion_tokens for reply in replies)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 5


# ── Faults

@pytest.mark.parametrize("kind", [*REPORTS, "reset", "late"])
def test_a_reply_is_billed_by_the_rule_whatever_is_said_of_it(kind):
    with loopback(faults={kind: 1}, responder=lambda body: "Well said.", hang=60) as server:
        with suppress(openai.APIConnectionError):
            reply = ask(server, timeout=.5)
            assert kind in REPORTS and reply.choices[0].message.content == "Well said."
        stats = server.stats()
    assert stats["prompt_tokens"] == prompt_tokens(messages())
    assert stats["completion_tokens"] == tokens("Well said.")
