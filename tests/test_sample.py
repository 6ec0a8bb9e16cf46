"""sample.py: answers side by side, critiques below, and merged checkpoints for pipelines."""

import io
import json
import os
import re
import shutil
import textwrap

import pytest
import sample
import toy
from helpers import ROOT, error_message, randomise, run_main
from model import add_lora, encode_prompt, eos_ids, load_lora, load_model, save_lora, use_lora
from sampling import generate
from transformers import pipeline


def random_adapter(base, folder, scale=0.1) -> str:
    """Save an adapter with random weights for this base; return its directory."""
    model, _ = load_model(base, device="cpu")
    randomise(add_lora(model, "policy", 4, 8), scale)
    save_lora(model, "policy", folder)
    return str(folder)


def answer(model, tokenizer, prompt, adapter) -> tuple[str, bool]:
    """The greedy answer with an adapter that is not merged, and whether it ends with EOS."""
    with use_lora(model, adapter):
        ids, = generate(model, [encode_prompt(tokenizer, prompt)], 48, 0,
                        eos_ids(tokenizer, model))
    return tokenizer.decode(ids, skip_special_tokens=True), len(ids) < 48


@pytest.mark.parametrize("name", ["toy", "stories", "smollm2"])
def test_a_pipeline_on_the_merged_directory_answers_as_the_project(name, request, tmp_path):
    """toy/base has no BOS and no template, stories260K has BOS, SmolLM2 has a template. The
    base's own sampling settings have no effect. Its EOS is added to the tokenizer's."""
    source = (ROOT / "toy" / "base" if name == "toy" else os.environ.get("SMOLLM2", "")
              if name == "smollm2" else
              request.getfixturevalue("shared") / "models" / "stories260K")
    if not os.path.isdir(source):
        pytest.skip("SMOLLM2 names no directory of SmolLM2-135M-Instruct")
    base = shutil.copytree(source, tmp_path / "base", copy_function=shutil.copyfile)
    path = base / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {
        "do_sample": True, "temperature": 2.0, "repetition_penalty": 1.5, "eos_token_id": 3}))
    adapter = random_adapter(base, tmp_path / "policy", 0.06 if name == "toy" else 0.1)
    run_main("--model", base, "--adapter", adapter, "--merge", tmp_path / "merged",
             module=sample)
    model, tokenizer = load_model(base, device="cpu")
    load_lora(model, "policy", adapter)
    merged = pipeline("text-generation", str(tmp_path / "merged"), device="cpu")
    changed, ended = 0, 0
    questions = [toy.prompt(row) for row in toy.rows("eval", 3)] + ["Once upon a time"]
    chats = [[{"role": "user", "content": text}] for text in questions]
    chats.append([{"role": "system", "content": "Be brief."}, *chats[0],
                  {"role": "assistant", "content": "<b> {{ 7 }}"}, *chats[3]])
    for turns in chats:
        expected, has_ended = answer(model, tokenizer, turns, "policy")
        output, = merged(turns, max_new_tokens=48)
        assert output["generated_text"][-1] == {"role": "assistant", "content": expected}
        changed += expected != answer(model, tokenizer, turns, None)[0]
        ended += has_ended
    assert changed >= 3, "the adapter must change the answers"
    assert ended or name != "toy"
    with pytest.raises(FileExistsError):
        run_main("--adapter", adapter, "--model", base, "--merge", base, module=sample)


def test_answers_stand_side_by_side_and_critiques_below(finished_run, capsys, monkeypatch):
    """The prompt is a flag, or is typed in several lines."""
    prompt = toy.prompt(toy.rows("eval", 3)[2])
    flags = ["--adapter", finished_run / "policy", "--reward_model",
             finished_run / "reward" / "adapter", "--max_new_tokens", 96]
    run_main(*flags, "--prompt", prompt, module=sample)
    output = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{prompt}\n"))
    run_main(*flags, module=sample)
    assert capsys.readouterr().out == output and "\n\n" in prompt
    table, *critiques = output.split("\n\n")
    header, _, *rows = table.splitlines()
    assert header.split() == ["base", "policy"]
    model, tokenizer = load_model(ROOT / "toy" / "base", device="cpu")
    load_lora(model, "policy", finished_run / "policy")
    marks = []
    for name, start in (("base", 0), ("policy", 40)):
        text, _ = answer(model, tokenizer, prompt, name if start else None)
        pieces = [row[start : start + 38].rstrip() for row in rows]
        assert [*filter(None, pieces)] == textwrap.wrap(text, 38) and len(rows) > 1
        line, z, spans = critiques.pop(0).strip().splitlines()
        tokens = line.removeprefix(f"{name}: ")
        assert re.sub(r"\[[+-]|[+-]\]", "", tokens) == text and z.startswith("R_φ: The ")
        spans = json.loads(spans)
        for sign, key in (("+", "good_spans"), ("-", "poor_spans")):
            marked = re.findall(rf"\[\{sign}(.*?)\{sign}\]", tokens)
            assert all(any(part in quote for quote in spans[key]) for part in marked)
            marks += marked
    assert marks and not any(critiques)


def test_a_column_keeps_all_letters_of_prose_and_code():
    text = ("def f(x):\n    if x:\n        return 'a_name_without_spaces_that_is_too_long'\n\n"
            "A sentence that is just somewhat longer than the column is wide.")
    pieces = re.findall(sample.PIECE, text)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert pieces[:2] == ["def f(x):", "    if x:"] and max(map(len, pieces)) <= 38
    assert pieces[-2:] == [text[-64:-32], text[-31:]]


def test_a_missing_or_wrong_adapter_is_one_line(shared, tmp_path):
    stories = shared / "models" / "stories260K"
    adapter = random_adapter(stories, tmp_path / "policy")
    for flags, message in [
            (["--adapter", tmp_path], f"{tmp_path} holds no adapter_config.json"),
            (["--adapter", adapter], "trained on another base .*stories260K"),
            (["--model", stories, "--adapter", adapter, "--reward_model", tmp_path / "none"],
             "none holds no adapter")]:
        assert re.search(message, error_message("sample.py", "--prompt", "x", *flags))
