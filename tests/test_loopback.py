"""The loopback server does what it says, spoken to by the real client: else annotation's tests prove nothing."""

import asyncio
import json
import time

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from annotate import ground, parse_feedback
from loopback import digest, loopback, prompt_tokens, tokens

RESPONSE = "Héllo there, the plot of the film is told well but the name of the “hero” is wrong."
JSON_MODE = {"type": "json_object"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object"}}}


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def messages(response=RESPONSE):
    return [{"role": "system", "content": "Judge."}, {"role": "user", "content": (
        f"<request>\nSum up.\n</request>\n\n<response>\n{response}\n</response>")}]


def ask(server, response=RESPONSE, key="sk-loopback", retries=0, timeout=10, **options):
    with OpenAI(base_url=server.url, api_key=key, max_retries=retries, timeout=timeout) as one:
        return one.chat.completions.create(**{"model": "m", "messages": messages(response), **options})


# ── Replies and the bill

@pytest.mark.parametrize("form", [None, JSON_MODE, SCHEMA])
@pytest.mark.parametrize("response", [RESPONSE, "one", "a b a b a b", "Zeile\r\nzwei \t drei " * 3 + "Ende 🎉"])
def test_the_critique_is_readable_and_every_quote_is_found(form, response):
    with loopback() as server:
        text = ask(server, response, **({"response_format": form} if form else {})).choices[0].message.content
    grounding, feedback = ground(response, parse_feedback(text)), parse_feedback(text)
    assert not grounding.unmatched and not grounding.ambiguous
    assert len(grounding.spans) == len(feedback.good_spans + feedback.poor_spans) >= (" b" not in response)
    assert text.startswith("{") == (form is not None)


@pytest.mark.parametrize("counting", ["quarters", "pieces"])
def test_the_bill_is_the_stated_count_of_what_was_sent(counting):
    with loopback(counting=counting) as server:
        replies = [ask(server, f"{RESPONSE} {k}") for k in range(3)]
        stats = server.stats()
        short = ask(server, max_tokens=5)
    for k, reply in enumerate(replies):
        assert reply.usage.prompt_tokens == prompt_tokens(messages(f"{RESPONSE} {k}"), counting)
        assert reply.usage.completion_tokens == tokens(reply.choices[0].message.content, counting)
    assert stats["prompt_tokens"] == sum(reply.usage.prompt_tokens for reply in replies)
    assert stats["completion_tokens"] == sum(reply.usage.completion_tokens for reply in replies)
    assert short.choices[0].finish_reason == "length" and short.usage.completion_tokens == 5


def test_tokens_by_quarters_and_pieces():
    assert [tokens("abcde"[:n]) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    pieces = ["The", "  ", "plot", "'", "s", " ", "123", "45", " unforget", "table", "!"]
    assert tokens("".join(pieces), "pieces") == len(pieces)
    assert prompt_tokens([{"content": "abcde"}, {"content": ""}]) == 3 + 3 + 2 + 3


# ── Faults

@pytest.mark.parametrize("kind, error", [
    ("429", openai.RateLimitError), ("quota", openai.RateLimitError), ("500", openai.InternalServerError),
    ("timeout", openai.APITimeoutError), ("invalid", json.JSONDecodeError)])
def test_a_fault_that_the_client_raises(kind, error):
    with loopback(faults={kind: 1}, hang=60) as server, pytest.raises(error) as caught:
        ask(server, timeout=.2)
    if kind == "quota":
        assert caught.value.code == "insufficient_quota"


@pytest.mark.parametrize("kind, finish, content", [
    ("garbage", "stop", "weather"), ("truncated", "length", "textual_feedback"),
    ("filter", "content_filter", None), ("null", "stop", None), ("refusal", "stop", None)])
def test_a_reply_that_is_of_no_use(kind, finish, content):
    with loopback(faults={kind: 1}) as server:
        choice = ask(server).choices[0]
    assert choice.finish_reason == finish and (choice.message.refusal is not None) == (kind == "refusal")
    assert content in choice.message.content if content else choice.message.content is None
    assert content is None or not choice.message.content.endswith("```")


def test_the_plan_says_what_happens_to_the_first_calls():
    with loopback(plan=["429", "500", "ok", "500", "empty"], retry_after="0.01") as server:
        ask(server, retries=2)
        with pytest.raises(openai.InternalServerError):
            ask(server)
        assert ask(server).choices == [] and ask(server).choices
        stats = server.stats()
    assert stats["statuses"] == {"429": 1, "500": 2, "200": 3} and stats["faults"] == {"429": 1, "500": 2, "empty": 1}


def test_a_seed_gives_the_same_faults_in_any_order():
    def fates(order, seed):
        with loopback(faults={"empty": .3}, seed=seed) as server:
            return {k: bool(ask(server, str(k)).choices) for k in order}
    there = fates(range(40), 1)
    assert there == fates(reversed(range(40)), 1) != fates(range(40), 2)
    assert list(there.values()).count(False) / 40 == pytest.approx(.3, abs=.2)


# ── What a server refuses

@pytest.mark.parametrize("settings, options, error, code, param", [
    ({"key": "right"}, {}, openai.AuthenticationError, "invalid_api_key", None),
    ({"models": ["big"]}, {}, openai.NotFoundError, "model_not_found", None),
    ({"context": 20}, {}, openai.BadRequestError, "context_length_exceeded", "messages"),
    ({"structured": "json_object"}, {"response_format": SCHEMA}, openai.BadRequestError, None, "response_format"),
    ({"structured": "none"}, {"response_format": JSON_MODE}, openai.BadRequestError, None, "response_format"),
    ({"structured": "none", "vague": True}, {"response_format": SCHEMA}, openai.BadRequestError, None, None),
    ({"token_parameter": "max_completion_tokens"}, {"max_tokens": 9}, openai.BadRequestError,
     "unsupported_parameter", "max_tokens"),
    ({"token_parameter": "max_completion_tokens"}, {"temperature": .3}, openai.BadRequestError,
     "unsupported_value", "temperature"),
    ({"token_parameter": "max_tokens"}, {"max_completion_tokens": 9}, openai.BadRequestError, None, None)])
def test_a_refusal_names_what_it_is_about(settings, options, error, code, param):
    with loopback(**settings) as server, pytest.raises(error) as caught:
        ask(server, **options)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize("settings, options", [
    ({"key": "sk-loopback", "models": ["m"], "context": 500}, {}),
    ({"structured": "json_object"}, {"response_format": JSON_MODE}),
    ({"structured": "ignored"}, {"response_format": SCHEMA}),
    ({"token_parameter": "max_completion_tokens"}, {"max_completion_tokens": 99, "temperature": 1})])
def test_what_a_server_takes_it_answers(settings, options):
    with loopback(responder=lambda body: body["model"].upper(), **settings) as server:
        assert ask(server, **options).choices[0].message.content == "M"


# ── Counting

@pytest.mark.parametrize("process", [False, True])
def test_what_was_asked_is_counted(process):
    """In a thread and in a process: double asking, concurrency and the delay can be read from /stats."""
    async def together(url):
        async with AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as one:
            calls = (one.chat.completions.create(model="m", messages=messages(str(k // 2))) for k in range(12))
            return await asyncio.gather(*calls)
    with loopback(process=process, delay=.3, models=["m"]) as server:
        asyncio.run(together(server.url))
        stats = server.stats()
    names = {digest(messages(str(k))[1]["content"]): 2 for k in range(6)}
    assert stats["asked"] == stats["answered"] == names
    assert (stats["calls"], stats["max_concurrent"], stats["under_way"], len(stats["recent"])) == (12, 12, 0, 5)


def test_an_answer_that_nobody_waited_for_is_asked_but_not_answered():
    with loopback(delay=.4) as server:
        with pytest.raises(openai.APITimeoutError):
            ask(server, timeout=.1)
        time.sleep(.6)
        stats = server.stats()
    assert sum(stats["asked"].values()) == 1 and not stats["answered"] and not stats["prompt_tokens"]


def test_an_unknown_setting_is_an_error():
    with pytest.raises(TypeError, match="dealy"), loopback(dealy=1):
        pass
