"""Single-bit flips in the files of a run, in four states: nothing is trained on a damaged file.

`SLOW=1 python -m pytest -n 0 -s tests/test_damage.py` flips 320 bits and prints the table of
FAULTS.md; the suite flips eight.
"""

import gc
import random
import shutil
from collections import Counter

import pytest
import reward_model
import policy
import text2grad
from data import InputError
from helpers import SLOW, assert_equal_tensors, run_main

FLAGS = ["--annotated_rows", 60, "--iterations", 2, "--batch_size", 4, "--minibatch_size", 4,
         "--eval_rows", 4, "--save_every", 1, "--ppo_epochs", 1, "--max_new_tokens", 16,
         "--max_critique_tokens", 64, "--probe_rows", 4]
STATES = ["annotated", "phase 2", "phase 3", "finished"]
TENSORS = ["policy/adapter_model.safetensors", "value_head.safetensors",
           "reward/adapter/adapter_model.safetensors"]
FLIPS = 80 if SLOW else 2                                    # per state


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """One run, and copies of its directory from its annotation, phase 2 and phase 3."""
    folder = tmp_path_factory.mktemp("states")
    out = folder / "finished"

    def copy_at(module, name, state, iteration):
        original = getattr(module, name)

        def wrapper(directory, optimizer, values, *args):
            path = original(directory, optimizer, values, *args)
            if values["iteration"] == iteration:
                shutil.copytree(out, folder / state)
            return path
        patch.setattr(module, name, wrapper)

    def copy_annotated(*args):
        shutil.copytree(out, folder / "annotated")
        return original_fit(*args)

    original_fit = reward_model.fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text2grad, "MOST_UNREADABLE", 1.0)
        patch.setattr(text2grad, "fit", copy_annotated)
        patch.setattr(reward_model, "SAVE_EVERY", 2)
        copy_at(reward_model, "keep_checkpoint", "phase 2", 4)
        copy_at(policy, "keep_checkpoint", "phase 3", 1)
        run_main(*FLAGS, "--output_dir", out)
    return folder


def flip_bit(path, bit: int):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("state", STATES)
def test_no_phase_uses_a_file_with_a_flipped_bit(states, state, tmp_path, capsys, monkeypatch):
    """Each run ends in one line that names the damage, or with the weights of the first run.

    The small R_φ writes no readable critique, which would stop phase 3.
    """
    monkeypatch.setattr(text2grad, "MOST_UNREADABLE", 1.0)
    rng = random.Random(state)
    files = sorted(path.relative_to(states / state) for path in (states / state).rglob("*")
                   if path.is_file() and path.stat().st_size)
    important = "feedback.jsonl", "adapter_model.safetensors"
    files.sort(key=lambda file: file.name not in important)
    outcomes = Counter()
    for number in range(FLIPS):
        file = files[number % len(files)]
        out = tmp_path / str(number)
        shutil.copytree(states / state, out)
        bit = rng.randrange(8 * (out / file).stat().st_size)
        flip_bit(out / file, bit)
        try:
            run_main(*FLAGS, "--output_dir", out)
            for name in TENSORS:
                assert_equal_tensors(out / name, states / "finished" / name)
            outcomes["the same weights"] += 1
        except InputError as error:
            assert str(out) in str(error) and "\n" not in str(error)
            outcomes["refused in one line"] += 1
        except AssertionError as error:
            outcomes[f"other weights: {file}, bit {bit}: {error}"] += 1
        except Exception as error:
            outcomes[f"traceback: {file}, bit {bit}: {error!r}"] += 1
        gc.collect()                                  # closes the lock of a failed run
        capsys.readouterr()
        shutil.rmtree(out)
    with capsys.disabled():
        if SLOW:
            print(f"\n{state}, {len(files)} files, {FLIPS} flips: {dict(outcomes)}")
    assert outcomes.keys() <= {"the same weights", "refused in one line"}, outcomes
