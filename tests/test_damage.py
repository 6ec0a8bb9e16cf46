"""Single-bit flips in the files of a run, in four states: nothing is trained on a damaged file.

`SLOW=1 python -m pytest -n 0 -s tests/test_damage.py` flips 320 bits and prints the table of
FAULTS.md; the suite flips eight.
"""

import gc
import random
import shutil
from collections import Counter

import policy
import pytest
import reward_model
import text2grad
from data import InputError
from helpers import SLOW, assert_equal_tensors, run_main

FLAGS = ["--annotated_rows", 60, "--iterations", 2, "--batch_size", 4, "--minibatch_size", 4,
         "--eval_rows", 4, "--save_every", 1, "--ppo_epochs", 1, "--max_new_tokens", 16,
         "--max_critique_tokens", 64, "--probe_rows", 4]
TENSORS = ["policy/adapter_model.safetensors", "value_head.safetensors",
           "reward/adapter/adapter_model.safetensors"]
FLIPS = 80 if SLOW else 2                                    # per state


@pytest.fixture(autouse=True, scope="module")
def _unreadable_critiques():
    """The small R_φ writes no readable critique, which would stop phase 3."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text2grad, "MOST_UNREADABLE", 1.0)
        yield


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """One run, and copies of its directory from the start of phase 2, phase 2 and phase 3."""
    folder = tmp_path_factory.mktemp("states")

    def copy_before(module, name, state, iteration=None):
        def wrapper(*arguments):
            if iteration is None or arguments[2]["iteration"] == iteration:
                shutil.copytree(folder / "finished", folder / state)
            return original(*arguments)

        original = getattr(module, name)
        patch.setattr(module, name, wrapper)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward_model, "SAVE_EVERY", 2)
        copy_before(text2grad, "fit", "annotated")
        copy_before(reward_model, "keep_checkpoint", "phase 2", 6)
        copy_before(policy, "keep_checkpoint", "phase 3", 2)
        run_main(*FLAGS, "--output_dir", folder / "finished")
    return folder


@pytest.mark.parametrize("state", ["annotated", "phase 2", "phase 3", "finished"])
def test_no_phase_uses_a_file_with_a_flipped_bit(states, state, tmp_path, capsys):
    """Each run ends in one line that names the damage, or with the weights of the first run."""
    rng = random.Random(state)
    files = sorted(path.relative_to(states / state) for path in (states / state).rglob("*")
                   if path.is_file() and path.stat().st_size)
    important = "feedback.jsonl", "adapter_model.safetensors"
    files.sort(key=lambda file: file.name not in important)
    outcomes = Counter()
    for number in range(FLIPS):
        out = shutil.copytree(states / state, tmp_path / str(number))
        file = out / files[number % len(files)]
        data = bytearray(file.read_bytes())
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        try:
            run_main(*FLAGS, "--output_dir", out)
            for name in TENSORS:
                assert_equal_tensors(out / name, states / "finished" / name)
            outcomes["the same weights"] += 1
        except InputError as error:
            assert str(out) in str(error) and "\n" not in str(error)
            outcomes["refused in one line"] += 1
        except Exception as error:
            outcomes[f"{file}, bit {bit}: {error!r}"] += 1
        gc.collect()                                  # closes the lock of a failed run
        capsys.readouterr()
        shutil.rmtree(out)
    with capsys.disabled():
        if SLOW:
            print(f"\n{state}, {len(files)} files, {FLIPS} flips: {dict(outcomes)}")
    assert outcomes.keys() <= {"the same weights", "refused in one line"}, outcomes
