"""--critic annotator: the annotator judges the rollouts, so a run needs no R_φ.

Independent side: `true_critic` of experiments/, which calls the annotator function directly.
"""

from dataclasses import fields

import pytest
import torch
import toy
from annotate import token_offsets
from experiments.designs import true_critic
from helpers import error_message, random_rollouts, run_main, toy_config
from model import add_lora, encode_text
from policy import sample_rollouts
from runtime import CHANGEABLE, POLICY_SETTINGS
from settings import Config
from reward_model import annotator_critic

RUN = ["--iterations", 2, "--batch_size", 8, "--minibatch_size", 8, "--eval_rows", 4,
       "--critic", "annotator"]


@pytest.mark.parametrize("task", ["toy", "notebooks.prose:TASK"])    # prose: repeats are poor
def test_the_annotator_judges_as_a_direct_call_does(toy_model, tmp_path, task):
    model, tokenizer = toy_model
    add_lora(model, "policy", 4, 8)
    config = toy_config(task=task, output_dir=str(tmp_path), max_new_tokens=24, mode="cot")
    rows = toy.rows("train", 6) * 2                    # each post twice: equal texts, too
    batch = sample_rollouts(model, tokenizer, rows, config, "policy", torch.Generator())
    for i, text in enumerate(batch.texts):                     # every fact is repeated
        ids = encode_text(tokenizer, f"{text} {text}")
        batch.texts[i], batch.offsets[i] = token_offsets(tokenizer, ids)
    batch.texts[3] = ""
    expected = true_critic(batch, model, tokenizer, config)
    for _ in range(2):                                 # the second time from the journal
        judgements = annotator_critic(batch, model, tokenizer, config)
        assert [x.delta for x in judgements] == [x.delta for x in expected]
        assert [x.critique for x in judgements] == [x.critique for x in expected]
        assert [bool(x.reason) for x in judgements] == [i == 3 for i in range(12)]


def test_a_run_with_the_annotator_has_neither_feedback_nor_a_reward_model(tmp_path):
    run_main(*RUN, "--output_dir", tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"result.json", "policy", "report.html"} <= names
    assert not {"responses.jsonl", "feedback.jsonl", "reward"} & names
    message = error_message("text2grad.py", *RUN[:-2], "--output_dir", tmp_path / "run",
                            "--reward_model", "elsewhere")
    assert "elsewhere" in message                      # R_φ needs an adapter that is there
    message = error_message("text2grad.py", *RUN, "--output_dir", tmp_path / "run",
                            "--annotator_function", "toy:fact_accuracy")
    assert "critic_name was toy:critique, is toy:fact_accuracy" in message


@pytest.mark.parametrize("flags, message", [
    (("--annotator_function", "none"), "set --max_usd with --price_in and --price_out"),
    (("--critic", "people"), "--critic: invalid choice: 'people'")])
def test_a_critic_that_cannot_judge_is_one_line(tmp_path, monkeypatch, flags, message):
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    assert message in error_message("text2grad.py", *RUN, *flags, "--output_dir", tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_name_that_binds_a_run_is_a_flag():
    flags = {setting.name for setting in fields(Config)}
    assert POLICY_SETTINGS - {"critic_name"} <= flags
    assert CHANGEABLE - {"torch", "transformers", "commit"} <= flags


def test_random_rollouts_have_as_many_judgements_as_rows(toy_model, tmp_path, monkeypatch):
    """Two ranks: each gets the judgements of its own rows from rank 0."""
    rollouts = random_rollouts()
    judged = list(range(len(rollouts.rows)))
    monkeypatch.setattr("reward_model.judge_by_annotator", lambda *_: judged)
    for rank in (0, 1):
        monkeypatch.setattr("reward_model.RANK", rank)
        monkeypatch.setattr("reward_model.WORLD_SIZE", 2)
        monkeypatch.setattr("reward_model.gather_rows", lambda share: [judged, None])
        assert annotator_critic(rollouts, None, None, toy_config()) == judged[rank::2]
