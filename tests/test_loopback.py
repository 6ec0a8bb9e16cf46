"""The loopback server does what it says, spoken to by the real client: else the tests of annotation prove nothing."""

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
    return [{"role": "system", "content": "Judge."},
            {"role": "user", "content": f"<request>\nSum up.\n</request>\n\n<response>\n{response}\n</response>"}]


def client(server, key="sk-loopback", **options) -> OpenAI:
    return OpenAI(base_url=server.url, api_key=key, **{"max_retries": 0, **options})


def ask(server, response=RESPONSE, key="sk-loopback", retries=0, timeout=10, **options):
    with client(server, key, max_retries=retries, timeout=timeout) as one:
        return one.chat.completions.create(**{"model": "m", "messages": messages(response), **options})


# ── Replies and the bill ────────────────────────────────────────────────────────────────────────────────

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
    for k, reply in enumerate(replies):
        assert reply.usage.prompt_tokens == prompt_tokens(messages(f"{RESPONSE} {k}"), counting)
        assert reply.usage.completion_tokens == tokens(reply.choices[0].message.content, counting)
    assert stats["prompt_tokens"] == sum(reply.usage.prompt_tokens for reply in replies)
    assert stats["completion_tokens"] == sum(reply.usage.completion_tokens for reply in replies)


def test_tokens_by_quarters_and_pieces():
    assert [tokens("abcde"[:n]) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    pieces = ["The", "  ", "plot", "'", "s", " ", "123", "45", " unforget", "table", "!"]
    assert tokens("".join(pieces), "pieces") == len(pieces)
    assert prompt_tokens([{"content": "abcde"}, {"content": ""}]) == 3 + 3 + 2 + 3


@pytest.mark.parametrize("counting", ["quarters", "pieces"])
def test_max_tokens_cuts_the_reply(counting):
    with loopback(counting=counting) as server:
        reply = ask(server, max_tokens=5)
    assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 5


def test_a_responder_writes_the_replies():
    with loopback(responder=lambda body: body["model"].upper()) as server:
        assert ask(server).choices[0].message.content == "M"


# ── Faults ──────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("kind, error", [
    ("429", openai.RateLimitError), ("quota", openai.RateLimitError), ("500", openai.InternalServerError),
    ("timeout", openai.APITimeoutError), ("invalid", json.JSONDecodeError)])
def test_a_fault_that_the_client_raises(kind, error):
    with loopback(faults={kind: 1}, hang=60) as server, pytest.raises(error) as caught:
        ask(server, timeout=.2)
    if kind == "quota":
        assert caught.value.code == "insufficient_quota"


@pytest.mark.parametrize("kind, finish, content", [
    ("garbage", "stop", "weather"), ("truncated", "length", "textual_feedback"), ("filter", "content_filter", None),
    ("null", "stop", None), ("refusal", "stop", None)])
def test_a_reply_that_is_of_no_use(kind, finish, content):
    with loopback(faults={kind: 1}) as server:
        choice = ask(server).choices[0]
    assert choice.finish_reason == finish and (choice.message.refusal is not None) == (kind == "refusal")
    assert content in choice.message.content if content else choice.message.content is None
    assert content is None or not choice.message.content.endswith("```")


def test_empty_choices():
    with loopback(faults={"empty": 1}) as server:
        assert ask(server).choices == []


@pytest.mark.parametrize("setting, name, value", [
    ("7", "retry-after", "7"), ("0.25", "retry-after", "0.25"), ("ms:250", "retry-after-ms", "250"),
    ("", "retry-after", None)])
def test_retry_after_is_sent_as_set(setting, name, value):
    with loopback(plan=["429"], retry_after=setting) as server, pytest.raises(openai.RateLimitError) as caught:
        ask(server)
    assert caught.value.response.headers.get(name) == value


def test_the_client_waits_for_the_date_it_is_given():
    with loopback(plan=["429", "ok"], retry_after="date:2") as server:
        ask(server, retries=1)
        first, second = server.stats()["arrivals"]
    assert 0.9 < second - first < 2.5                           # a date has whole seconds


def test_the_plan_says_what_happens_to_the_first_calls():
    with loopback(plan=["429", "500", "ok", "500"], retry_after="0.01") as server:
        ask(server, retries=2)
        with pytest.raises(openai.InternalServerError):
            ask(server)
        assert ask(server).choices
        stats = server.stats()
    assert stats["statuses"] == {"429": 1, "500": 2, "200": 2} and stats["faults"] == {"429": 1, "500": 2}


def test_a_seed_gives_the_same_faults_in_any_order():
    def fates(order, seed):
        out = {}
        with loopback(faults={"500": .3, "empty": .2}, seed=seed) as server, client(server) as one:
            for k in order:
                try:
                    out[k] = bool(one.chat.completions.create(model="m", messages=messages(str(k))).choices)
                except openai.InternalServerError:
                    out[k] = None
        return out
    there = fates(range(60), 1)
    assert there == fates(reversed(range(60)), 1) != fates(range(60), 2)
    shares = [list(there.values()).count(fate) / 60 for fate in (None, False, True)]
    assert shares == pytest.approx([.3, .2, .5], abs=.2)


# ── What a server refuses ───────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("settings, options, error, code, param", [
    ({"key": "right"}, {}, openai.AuthenticationError, "invalid_api_key", None),
    ({"models": ["big"]}, {}, openai.NotFoundError, "model_not_found", None),
    ({"context": 20}, {}, openai.BadRequestError, "context_length_exceeded", "messages"),
    ({"structured": "json_object"}, {"response_format": SCHEMA}, openai.BadRequestError, None, "response_format"),
    ({"structured": "none"}, {"response_format": JSON_MODE}, openai.BadRequestError, None, "response_format"),
    ({"structured": "none", "vague": True}, {"response_format": SCHEMA}, openai.BadRequestError, None, None),
    ({"token_parameter": "max_completion_tokens"}, {"max_tokens": 9}, openai.BadRequestError, "unsupported_parameter",
     "max_tokens"),
    ({"token_parameter": "max_completion_tokens"}, {"temperature": .3}, openai.BadRequestError, "unsupported_value",
     "temperature"),
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
    with loopback(**settings) as server:
        assert ask(server, **options).choices[0].message.content


# ── Counting ────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("process", [False, True])
def test_what_was_asked_is_counted(process):
    """In a thread and in a process: double asking, concurrency and the delay can be read from /stats."""
    async def together(url):
        async with AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as one:
            calls = (one.chat.completions.create(model="m", messages=messages(str(k // 2))) for k in range(12))
            return await asyncio.gather(*calls)
    with loopback(process=process, delay=.3, models=["m"]) as server:
        begin = time.time()
        asyncio.run(together(server.url))
        stats, passed = server.stats(), time.time() - begin
    assert passed >= .3 and all(begin - .1 <= at <= begin + passed for at in stats["arrivals"])
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


# ── Batches ─────────────────────────────────────────────────────────────────────────────────────────────

def line(name, response=RESPONSE, **body):
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": messages(response), **body}}


def submit(one, lines):
    content = "".join(json.dumps(row) + "\n" for row in lines).encode()
    file = one.files.create(file=("rows.jsonl", content), purpose="batch")
    assert one.files.content(file.id).read() == content and file.bytes == len(content)
    return one.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h",
                              metadata={"run": "7"})


def results(one, file_id):
    return {row["custom_id"]: row for row in map(json.loads, one.files.content(file_id).text.splitlines())}


def test_a_batch_ends_with_every_line_in_one_of_two_files():
    with loopback(batch_seconds=.6, context=400) as server, client(server) as one:
        batch, seen = submit(one, [line("a"), line("b", "Two words"), line("c", "word " * 900)]), []
        assert batch.status == "validating" and batch.metadata == {"run": "7"}
        while not seen or seen[-1].status != "completed":
            seen.append(one.batches.retrieve(batch.id))
            time.sleep(.05)
        done, stats = seen[-1], server.stats()
        good, bad = results(one, done.output_file_id), results(one, done.error_file_id)
        assert [b.id for b in one.batches.list(limit=5)] == [batch.id]
    assert list(dict.fromkeys(b.status for b in seen)) == ["validating", "in_progress", "completed"]
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (3, 2, 1)
    assert list(good) == ["b", "a"] and list(bad) == ["c"] and good["a"]["error"] is None
    said = good["a"]["response"]
    assert said["status_code"] == 200 and parse_feedback(said["body"]["choices"][0]["message"]["content"])
    assert bad["c"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert stats["calls"] == 3 and stats["prompt_tokens"] == sum(
        row["response"]["body"]["usage"]["prompt_tokens"] for row in good.values())


def test_an_expired_batch_brings_what_it_has():
    with loopback(batch_expires=2) as server, client(server) as one:
        done = one.batches.retrieve(submit(one, [line(str(k), f"word {k}") for k in range(5)]).id)
        good, bad = results(one, done.output_file_id), results(one, done.error_file_id)
        assert server.stats()["calls"] == 2
    assert done.status == "expired" and sorted(good) == ["0", "1"] and sorted(bad) == ["2", "3", "4"]
    assert bad["3"]["response"] is None and bad["3"]["error"]["code"] == "batch_expired"


def test_a_batch_with_wrong_lines_fails_and_asks_nothing():
    with loopback(models=["m"]) as server, client(server) as one:
        done = one.batches.retrieve(submit(one, [line("a"), line("a"), line("b", model="x"), {"custom_id": "d"}]).id)
        assert server.stats()["calls"] == 0
    assert done.status == "failed" and done.output_file_id is None
    assert [(e.line, e.code) for e in done.errors.data] == [
        (2, "duplicate_custom_id"), (3, "model_not_found"), (4, "invalid_request")]


def test_a_batch_can_be_cancelled_and_is_only_found_by_its_name():
    with loopback(batch_seconds=60) as server, client(server) as one:
        batch = submit(one, [line("a")])
        assert one.batches.cancel(batch.id).status == "cancelling"
        assert one.batches.retrieve(batch.id).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            one.batches.retrieve("batch_9")
        with pytest.raises(openai.BadRequestError):
            one.batches.create(input_file_id="file-9", endpoint="/v1/chat/completions", completion_window="24h")


def test_an_unknown_setting_is_an_error():
    with pytest.raises(TypeError, match="dealy"), loopback(dealy=1):
        pass
