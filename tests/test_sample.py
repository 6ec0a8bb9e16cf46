"""sample.py: the answers of base and policy, critiques below, and merged checkpoints."""

import io
import json
import re
import shutil

import pytest
import sample
import toy
from data import InputError
from helpers import ROOT, randomise, run_main
from model import add_lora, encode_prompt, eos_ids, load_lora, load_model, save_lora, use_lora
from sampling import generate
from transformers import pipeline


def random_adapter(base, folder, scale=0.1) -> str:
    """Save an adapter with random weights for this base; return its directory."""
    model, _ = load_model(base, device="cpu")
    randomise(add_lora(model, "policy", 4, 8), scale)
    save_lora(model, "policy", folder)
    return str(folder)


def answer(model, tokenizer, prompt, adapter) -> str:
    """The greedy answer with an adapter that is not merged."""
    with use_lora(model, adapter):
        ids, = generate(model, [encode_prompt(tokenizer, prompt)], 48, 0,
                        eos_ids(tokenizer, model))
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["toy", "stories"])
def test_a_pipeline_on_the_merged_directory_answers_as_the_project(name, shared, tmp_path):
    """toy/base has no BOS and no template, stories260K has BOS. The adapter names the base,
    whose own sampling settings have no effect."""
    source = ROOT / "toy" / "base" if name == "toy" else shared / "models" / "stories260K"
    base = shutil.copytree(source, tmp_path / "base", copy_function=shutil.copyfile)
    path = base / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {
        "do_sample": True, "temperature": 2.0, "repetition_penalty": 1.5, "eos_token_id": 3}))
    adapter = random_adapter(base, tmp_path / "policy", 0.06 if name == "toy" else 0.1)
    run_main("--adapter", adapter, "--merge", tmp_path / "merged", module=sample)
    model, tokenizer = load_model(base, device="cpu")
    load_lora(model, "policy", adapter)
    merged = pipeline("text-generation", str(tmp_path / "merged"), device="cpu")
    changed = 0
    chats = [[{"role": "user", "content": toy.prompt(row)}] for row in toy.rows("eval", 3)]
    chats.append([{"role": "system", "content": "Be brief."}, *chats[0],
                  {"role": "assistant", "content": "<b> {{ 7 }}"}, *chats[1]])
    for turns in chats:
        expected = answer(model, tokenizer, turns, "policy")
        output, = merged(turns, max_new_tokens=48)
        assert output["generated_text"][-1] == {"role": "assistant", "content": expected}
        changed += expected != answer(model, tokenizer, turns, None)
    assert changed >= 2, "the adapter must change the answers"
    with pytest.raises(FileExistsError):
        run_main("--adapter", adapter, "--merge", base, module=sample)


def test_both_answers_are_printed_each_with_its_critique(finished_run, capsys, monkeypatch):
    """The prompt is a flag, or is typed in several lines."""
    prompt = toy.prompt(toy.rows("eval", 3)[2])
    flags = ["--adapter", finished_run / "policy", "--max_new_tokens", 96]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{prompt}\n"))
    run_main(*flags, module=sample)
    plain = capsys.readouterr().out.strip().split("\n\n")
    run_main(*flags, "--prompt", prompt, "--reward_model", finished_run / "reward/adapter",
             module=sample)
    judged = capsys.readouterr().out.strip().split("\n\n")
    model, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
    load_lora(model, "policy", finished_run / "policy")
    marks = []
    for name, text, part in zip(("base", "policy"), plain, judged, strict=True):
        expected = answer(model, tokenizer, prompt, name if name == "policy" else None)
        line, tokens, *critique = part.strip().splitlines()
        assert text.strip() == line == f"{name}: {expected}"
        assert re.sub(r"\[[+-]|[+-]\]", "", tokens) == f"R_φ: {expected}"
        spans = json.loads(critique[1])
        for sign, key in (("+", "good_spans"), ("-", "poor_spans")):
            found = re.findall(rf"\[\{sign}(.*?)\{sign}\]", tokens)
            assert all(any(mark in quote for quote in spans[key]) for mark in found)
            marks += found
    assert marks


def test_a_missing_or_wrong_adapter_is_one_line(shared, tmp_path):
    adapter = random_adapter(shared / "models" / "stories260K", tmp_path / "policy")
    for flags, message in [
            (["--adapter", tmp_path], "No such file .*adapter_config.json"),
            (["--adapter", adapter, "--model", ROOT / "toy" / "base"],
             "does not fit --model"),
            (["--adapter", adapter, "--reward_model", tmp_path / "none"],
             "none/adapter_config.json is missing")]:
        with pytest.raises((InputError, FileNotFoundError), match=message):
            run_main("--prompt", "x", *flags, module=sample)
