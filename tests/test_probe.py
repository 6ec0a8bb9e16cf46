"""R_φ beside the annotator on the policy's own rollouts: figures, journal, budget, restart."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from conftest import fails
from loopback import loopback
from runs import rows_of

import text2grad
import toy
from annotate import annotate
from data import InputError, write_rows
from model import add_lora
from reward_model import Judgement, judge, token_figures
from text2grad import Config, Rollouts, annotator, probe, train

ASKED = []                                # responses of which `critic` was asked


def critic(row, response):
    """An annotator that praises "right", blames "wrong", and is at a loss for anything else."""
    ASKED.append(response)
    good, poor = re.findall("right", response), re.findall("wrong", response)
    said = json.dumps({"good_spans": good, "poor_spans": poor})
    return f"I read it.\n{said}" if good + poor else "What is this?"


@pytest.fixture(autouse=True)
def _nobody_was_asked():
    ASKED.clear()


def rollouts(said: dict[str, list[int]], rows: list[dict]) -> Rollouts:
    """A batch of these texts, a token for each word and one of EOS, with R_φ's δ' of each."""
    offsets = [[*(m.span() for m in re.finditer(r" ?\S+", y)), (len(y),) * 2] for y in said]
    judged = [Judgement("", list(map(float, delta))) for delta in said.values()]
    assert all(len(found.delta) == len(at) for found, at in zip(judged, offsets))
    none = [None] * 4                                # ids and masks, which nobody reads
    return Rollouts(rows, [], [*said], offsets, *none, judged)


# ── Figures

def test_what_r_phi_says_is_counted_against_the_annotator(tmp_path):
    """R_φ misses every second wrong token and praises one token of no merit; neither the empty
    response nor the unreadable reply nor what lies behind --probe_rows has any part in it."""
    said = {"right wrong so wrong": [1, -1, 0, 0, 0], "": [0],
            "so so": [-1, 1, 0],                               # the reply to it is unreadable
            "wrong right wrong so": [-1, 1, 0, 1, 0], "wrong wrong": [0, 0, 0]}
    batch = rollouts(said, toy.rows("train", 5))
    config = Config(critic="test_probe:critic", probe_rows=4)
    figures = {"true_delta": -2 / 10, "poor_recall": 2 / 4, "poor_precision": 2 / 2,
               "good_recall": 2 / 2, "good_precision": 2 / 3}
    assert probe(batch, config, tmp_path) == pytest.approx(figures)
    first, empty, unread, last, _ = said
    assert sorted(ASKED) == sorted([first, unread, last])
    assert probe(batch, config, tmp_path) == pytest.approx(figures)
    assert ASKED[3:] == [unread], "what was answered once is not asked again"


def test_where_nothing_can_be_read_there_is_no_figure(tmp_path):
    """No 0 either, which a curve would show as indifference."""
    batch = rollouts({"so so": [-1, 1, 0], "": [0]}, toy.rows("train", 2))
    figures = probe(batch, Config(critic="test_probe:critic"), tmp_path)
    assert ASKED == ["so so"] and {*figures} >= {"true_delta", "poor_recall", "good_precision"}
    assert {*figures.values()} == {None}


def test_what_cannot_be_divided_is_none_and_no_zero():
    counts = Counter({"good marked": 4, "good hit": 3, "poor predicted": 2})
    assert token_figures(counts) == {"good_precision": None, "good_recall": 3 / 4,
                                     "poor_precision": 0, "poor_recall": None}


def test_tokens_half_inside_get_nothing_and_are_counted_beside_conflicting_ones():
    """The quotes do not speak of the full stops; "Bob" is praised and blamed."""
    text = "Bob ran home. Ann sat down."
    offsets = [m.span() for m in re.finditer(r" ?\S+", text)]
    spans = {"good_spans": ["Bob", "home", "down"], "poor_spans": ["Bob ran"]}
    found = judge(f"I read it.\n{json.dumps(spans)}", text, offsets)
    assert found.delta == [0, -1, 0, 0, 0, 0]
    assert (found.quotes, found.conflicts, found.half_inside) == (4, 1, 2)


# ── In a run

def half_blind(rollouts, model, tokenizer, config):
    """In R_φ's place: misses every second poor token, and is else at one with the annotator."""
    judged = []
    for row, text, offsets in zip(rollouts.rows, rollouts.texts, rollouts.offsets):
        found = judge(toy.critique(row, text) if text.strip() else "", text, offsets)
        poor = [t for t, d in enumerate(found.delta) if d < 0]
        for t in poor[1::2]:
            found.delta[t] = 0.0
        judged.append(found)
    return judged


def toy_critic(row, response):
    ASKED.append((row["id"], response))
    return toy.critique(row, response)


def test_ten_times_in_a_run_which_is_killed_and_asks_nothing_twice(toy_model, tmp_path,
                                                                   monkeypatch):
    """Killed behind a probe, before its line in metrics.jsonl: the same run does the iteration
    again, with the same texts, whose replies lie in the journal."""
    model, tokenizer = toy_model
    add_lora(model, "policy")
    rows, whole, lost = toy.rows("train", 64, length=1), text2grad.record, []
    config = Config(critic="test_probe:toy_critic", iterations=20, batch_size=4, probe_rows=4,
                    minibatch_size=4, ppo_epochs=1, max_new_tokens=24, save_every=8)

    def start(out, config=config):
        train(model, tokenizer, rows, config, out, half_blind)
        return [timeless(row) for row in rows_of(out / "metrics.jsonl")]

    def timeless(row):
        return {key: x for key, x in row.items() if not key.startswith("seconds")}

    def killed(metrics, *args):
        if metrics["iteration"] == 10:
            lost.append(timeless(metrics))
            raise KeyboardInterrupt
        whole(metrics, *args)

    monkeypatch.setattr(text2grad, "record", killed)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run")
    before = len(ASKED)
    monkeypatch.setattr(text2grad, "record", whole)
    metrics = start(tmp_path / "run")
    assert [metrics[9]] == lost and len(ASKED) == len({*ASKED}) > before > 16
    probed = [row for row in metrics if "true_delta" in row]
    assert [row["iteration"] for row in probed] == [*range(2, 21, 2)]
    assert all(row["poor_precision"] in (1, None) for row in probed)
    recalls = [row["poor_recall"] for row in probed if row["poor_recall"] is not None]
    assert len(recalls) > 5 and all(0.5 <= recall <= 1 for recall in recalls)
    missed = [row for row in probed if row["poor_recall"] not in (1, None)]
    assert missed and all(row["true_delta"] < row["delta"] for row in missed)

    ASKED.clear()
    metrics = start(tmp_path / "none", replace(config, probe_rows=0, iterations=1))
    assert not ASKED and not {"true_delta", "poor_recall"} & metrics[0].keys()
    assert not [*(tmp_path / "none").glob("*.journal")]


def test_phase_1_and_the_probes_have_one_journal_and_one_budget(tmp_path):
    """What phase 1 has asked is not asked again; what it has left is all that a probe may cost.
    Nobody is told of tests that another response has passed."""
    rows = [{"id": str(i), "prompt": f"Question {i}?"} for i in range(3)]
    texts = [f"{i} is right and {i} was wrong" for i in range(3)]
    rows[2]["outcome"] = "All tests passed."                  # of a response of the row's own
    batch = rollouts(dict.fromkeys(texts, [1] * 8), rows)
    first = [row | {"response": text} for row, text in zip(rows, texts)][:2]
    write_rows(tmp_path / "responses.jsonl", first)
    with loopback() as server:
        def config(usd):
            return Config(task="ultrafeedback", critic=None, base_url=server.url,
                          price_in=1e3, price_out=1e3, max_usd=usd)

        def asked_and_billed():
            stats = server.stats()
            return stats["calls"], (stats["prompt_tokens"] + stats["completion_tokens"]) / 1e3

        annotate(annotator(config(1e6), tmp_path))
        calls, spent = asked_and_billed()
        assert calls == 2 and spent > 0
        with pytest.raises(InputError, match="--max_usd .* reached .* 1 questions left"):
            probe(batch, config(spent * 1.01), tmp_path)
        assert asked_and_billed() == (2, spent)
        figures = probe(batch, config(1e6), tmp_path)
        assert asked_and_billed()[0] == 3 and figures["good_recall"] == 1
        assert texts[2] in (said := str(server.stats()["recent"][-1])) and "passed" not in said
        assert probe(batch, config(0.0), tmp_path) == figures
        assert asked_and_billed()[0] == 3


def test_a_key_that_probes_will_need_is_missed_before_anything_is_done(tmp_path, monkeypatch):
    """Though phases 1 and 2, which need one too, are made already."""
    monkeypatch.delenv("OPENAI_API_KEY")
    flags = ["--task", "slf5k", "--data", tmp_path / "none", "--output_dir", tmp_path / "run",
             "--reward_model", tmp_path / "r"]
    assert "OPENAI_API_KEY is not set" in fails("text2grad.py", *flags, "--probe_rows", 4)
    assert "no such file" in fails("text2grad.py", *flags)
