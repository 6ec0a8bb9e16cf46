"""The loopback server does what it says, spoken to by the real client:
else annotation's tests prove nothing."""

import asyncio
import json
from contextlib import suppress

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from annotate import ground, parse_feedback
from loopback import REPORTS, digest, loopback, prompt_tokens, tokens

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

@pytest.mark.parametrize("kind, error", [
    ("429", openai.RateLimitError), ("quota", openai.RateLimitError),
    ("500", openai.InternalServerError),
    ("timeout", openai.APITimeoutError), ("late", openai.APITimeoutError),
    ("drip", openai.APITimeoutError), ("reset", openai.APIConnectionError),
    ("400", openai.BadRequestError), ("invalid", json.JSONDecodeError)])
def test_a_fault_that_the_client_raises(kind, error):
    with loopback(faults={kind: 1}, hang=60) as server, pytest.raises(error) as caught:
        ask(server, timeout=.2)
    assert "reset" not in kind or type(caught.value.__cause__).__name__ == "ReadError"
    if kind == "quota":
        assert caught.value.code == "insufficient_quota"


@pytest.mark.parametrize("kind, finish, content", [
    ("garbage", "stop", "weather"), ("truncated", "length", "textual_feedback"),
    ("filter", "content_filter", None), ("null", "stop", None)])
def test_a_reply_that_is_of_no_use(kind, finish, content):
    with loopback(faults={kind: 1}) as server:
        choice = ask(server).choices[0]
    assert choice.finish_reason == finish
    assert content in choice.message.content if content else choice.message.content is None
    assert content is None or not choice.message.content.endswith("```")


@pytest.mark.parametrize("kind", [*REPORTS, "reset", "late"])
def test_a_reply_is_billed_by_the_rule_whatever_is_said_of_it(kind):
    with loopback(faults={kind: 1}, responder=lambda body: "Well said.", hang=60) as server:
        with suppress(openai.APIConnectionError):
            reply = ask(server, timeout=.5)
            assert kind in REPORTS and reply.choices[0].message.content == "Well said."
        stats = server.stats()
    assert stats["prompt_tokens"] == prompt_tokens(messages())
    assert stats["completion_tokens"] == tokens("Well said.")


# ── What a server refuses

@pytest.mark.parametrize("settings, options, error, code, param", [
    ({"key": "right"}, {}, openai.AuthenticationError, "invalid_api_key", None),
    ({"models": ["big"]}, {}, openai.NotFoundError, "model_not_found", None),
    ({"context": 20}, {}, openai.BadRequestError, "context_length_exceeded", "messages"),
    ({"token_parameter": "max_completion_tokens"}, {"max_tokens": 9}, openai.BadRequestError,
     "unsupported_parameter", "max_tokens"),
    ({"token_parameter": "max_completion_tokens"}, {"temperature": .3}, openai.BadRequestError,
     "unsupported_value", "temperature"),
    ({"token_parameter": "max_tokens"}, {"max_completion_tokens": 9}, openai.BadRequestError,
     None, None)])
def test_a_refusal_names_what_it_is_about(settings, options, error, code, param):
    with loopback(**settings) as server, pytest.raises(error) as caught:
        ask(server, **options)
    assert (caught.value.code, caught.value.param) == (code, param)


# ── Counting

@pytest.mark.parametrize("process", [False, True])
def test_what_was_asked_is_counted(process):
    """In a thread and in a process:
    double asking, concurrency and the delay can be read from /stats."""
    async def together(url):
        async with AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as one:
            calls = (one.chat.completions.create(model="m", messages=messages(str(k // 2)))
                     for k in range(12))
            return await asyncio.gather(*calls)
    with loopback(process=process, delay=.3, models=["m"]) as server:
        asyncio.run(together(server.url))
        stats = server.stats()
    names = {digest(messages(str(k))[1]["content"]): 2 for k in range(6)}
    assert stats["asked"] == stats["answered"] == names
    assert ((stats["calls"], stats["max_concurrent"], stats["under_way"], len(stats["recent"]))
            == (12, 12, 0, 5))
