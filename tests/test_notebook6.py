"""The checks of notebook 6 find typical mistakes in its solutions and say what they are."""

import contextlib
import io
import math
import re
import sys

import pytest
from helpers import ROOT
from torch import Tensor

for package in ("nbformat", "IPython"):
    pytest.importorskip(package, reason=f"{package} is not installed: no notebook is tested")
import nbformat

from notebooks.checks import Wrong, check
from notebooks.mistakes import MISTAKES

CELLS = nbformat.read(ROOT / "notebooks" / "6_build_it_yourself.ipynb", as_version=4).cells
SOLUTIONS = {re.search(r"def (\w+)", cell.source)[1]: re.search(r"(?s)```python\n(.*?)```",
                                                                cell.source)[1]
             for cell in CELLS if cell.source.startswith("<details>")}
# (function, text in its solution, wrong text, part of the message or "": it has no hint)
EDITS = [
    ("token_rewards", "end <= span.end", "end < span.end", "so a token may end there"),
    ("token_rewards", "piece.strip() or piece", "piece", "characters need not be in the span"),
    ("token_rewards", "piece.strip()", "piece.lstrip()", ""),
    ("token_rewards", " or piece", "", "only whitespace is in a span that covers it whole"),
    ("token_rewards", "span.start <= start < end <= span.end",
     "max(start, span.start) < min(end, span.end)", "only partly in a span"),
    ("token_rewards", "sum(labels)", "max(labels, default=0)", ""),
    ("z_loss", "[len(prompt) - 1 : -1]", "[len(prompt) :]", "predict the token at i + 1"),
    ("z_loss", "z].sum()", "z].mean()", "a sum over its tokens"),
    ("z_loss", "z].sum()", "z].sum().detach()", "the gradient for A is missing"),
    ("z_loss", "loss - ", "loss + ", "minus the log-probability"),
    ("z_loss", "return loss", "return loss / len(pairs)", "over the pairs, not their mean"),
    ("lora_forward", "alpha / len", "alpha // len", "expected"),
    ("lora_forward", "(alpha / len(A)) * ", "", "scaled by α / r"),
    ("lora_forward", "alpha / len(A)", "alpha", "α / r, not α"),
    ("lora_forward", "x @ W.T + ", "", "added to the frozen layer's output"),
    ("lora_forward", "x @ A.T @ B.T", "x @ B @ A", "RuntimeError in line 2 of your function"),
    ("generate", "return answers", "return [[v for v in y if v != eos] for y in answers]",
     "includes its EOS"),
    ("generate", "if eos not in answer:", "if True:", "ends with its first EOS"),
    ("generate", "[0] * n + [1] * len(x)", "[1] * longest", "mask is 0 on padding"),
    ("generate", "logits / temperature", "logits", "divided by the temperature"),
    ("generate", "positions[:, -1:] + 1", "positions[:, -1:]", ""),
    ("generate", "[[0] * n + x for", "[x + [0] * n for", ""),
    ("generate", "ids.clamp(max=logits.shape[1] - 1)", "logits.argmax(-1, keepdim=True)", ""),
    ("generate", "temperature).softmax(-1)", "1).softmax(-1).div(temperature)", "Perhaps: the"),
    ("generate", "ids.clamp(max=logits.shape[1] - 1)", "ids", "expected 959. Hint: if no sum"),
    ("generate", "(sums <= u[:, None]).sum(-1, keepdim=True)",
     "(sums > u[:, None]).int().argmax(-1, keepdim=True)", "is V − 1, not 0"),
    ("generate", "(attention.cumsum(1) - 1)", "attention.cumsum(1)", "tokens[0] is 6, exp"),
    ("generate", "logits, cache = next_logits(model, ids, attention, positions, cache)",
     "seen = torch.cat([seen, ids], 1) if cache else ids; logits, cache = next_logits("
     "model, seen, attention, (attention.cumsum(1) - 1).clamp(min=0), None)",
     "columns read beyond those needed (8 of all"),
    ("gae", "gamma * lam * next", "lam * next", "γλ, not by λ"),
    ("gae", "reversed(range(rewards.shape[1]))", "reversed(range(rewards.shape[1] - 1))",
     "begins with token T"),
    ("gae", "gamma * lam * next", "gamma * next", "γλ, not by γ"),
    ("gae", "+ gamma * next_value", "+ next_value", "V_{t+1} is discounted by γ"),
    ("gae", "rewards * mask, values * mask", "rewards * mask, values", "V after the last"),
    ("gae", "advantages, advantages + values", "advantages, advantages", "the result[1][0, 0]"),
    ("ppo_loss", "return -(", "return (", "minus the objective"),
    ("ppo_loss", "/ mask.sum()", "/ mask.numel()", "without padding"),
    ("ppo_loss", "(logprobs - ", "(logprobs.detach() - ", "gradient for logprobs is missing"),
    ("ppo_loss", "minimum", "maximum", "not the maximum"),
    ("ppo_loss", "    ratio =", "    mask = mask.new_ones(4, 7)\n    ratio =", "use the mask"),
    ("ppo_loss", "-(gain * mask).sum() / mask.sum()",
     "-((gain * mask).sum(1) / mask.sum(1)).mean()", "not one per row"),
    ("ppo_loss", "torch.exp(", "(", "ratio is exp of"),
    ("update", "= policy_loss(", "= policy.ppo_loss(", "the argument policy_loss"),
    ("update", "    optimizer.step()\n", "", "Hint: call optimizer.step()"),
    ("update", "loss.backward()", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1); "
     "loss.backward(); return optimizer.step() or 0.0", "Hint: clip the gradient after"),
    ("update", "hidden.detach()", "hidden", "the value loss must not move θ"),
    ("update", "    optimizer.zero_grad()\n", "", "zero_grad"),
    ("update", "config.value_coef * ", "", "has the weight c"),
    ("update", "loss - config.entropy", "loss + config.entropy", "entropy is subtracted"),
    ("update", "(weights, 1.0)", "(weights, 1e9)", "clipped to the norm 1"),
]
KINDS = {"shape": "wrong (shape|length): expected .*, found |a number, but it is a list",
         "dtype": "wrong dtype: expected torch.float32, found torch.float64|but it is a str",
         "nan": " is nan .*, expected [-0-9]",
         "none": "None .is `return` missing"}


def run(source: str, names: dict) -> str:
    """Run a cell with the variables `names`; returns what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, f"cell-{hash(source)}", "exec"), names)
    return output.getvalue()


@pytest.fixture(scope="module")
def names():
    """The variables of the notebook's first cell, and `next_logits`."""
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.setenv("TQDM_DISABLE", "1")
        for cell in CELLS:
            if cell.cell_type == "code" and cell.source.startswith(("import", "def next")):
                run(cell.source, names)
    return names


def message(name: str, function) -> str:
    with pytest.raises(Wrong) as error:
        check(name, function)
    assert "\n" not in str(error.value)
    assert error.value._render_traceback_() == [f"wrong: {error.value}"]
    return str(error.value)


@pytest.mark.parametrize("name, right, wrong, part", EDITS)
def test_an_edit_of_a_solution_is_found(name, right, wrong, part, names):
    assert SOLUTIONS[name].count(right) == 1
    run(SOLUTIONS[name].replace(right, wrong), names)
    text = message(name, names[name])
    assert (part or "expected") in text and (part or "Hint" not in text)


@pytest.mark.parametrize("name, hint", [(name, hint) for name in MISTAKES
                                        for hint in MISTAKES[name]])
def test_each_hint_is_for_its_own_mistake(name, hint):
    assert message(name, lambda *inputs: MISTAKES[name][hint](*inputs)).endswith(hint)


def spoiled(kind: str, result):
    """A result with a wrong shape or dtype, or with NaN in the place of its numbers."""
    if kind == "none":
        return None
    if isinstance(result, tuple):
        return tuple(spoiled(kind, part) for part in result)
    if isinstance(result, list):
        return result[:-1] if kind == "shape" else [spoiled(kind, part) for part in result]
    if isinstance(result, Tensor):
        return {"shape": result[None], "dtype": result.double(), "nan": result * math.nan}[kind]
    return {"shape": [result], "dtype": str(result), "nan": math.nan}[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SOLUTIONS)
def test_wrong_shape_dtype_and_nan_are_named(name, kind, names):
    run(SOLUTIONS[name], names)
    text = message(name, lambda *inputs: spoiled(kind, names[name](*inputs)))
    assert re.search(KINDS[kind], text)


def test_the_last_cells_train_with_the_students_functions(names):
    """A short run, in which each function of the student is called."""
    called = set()
    names = names | {"called": called}
    for name, solution in SOLUTIONS.items():
        run(solution, names)
        run(f"def {name}(*inputs, call={name}):\n    called.add('{name}')\n"
            f"    return call(*inputs)", names)
    start = next(i for i, cell in enumerate(CELLS) if "= complete(" in cell.source)
    source = "\n".join(cell.source for cell in CELLS[start:] if cell.cell_type == "code")
    for long, short in ("=8,", "=1,"), ("160", "16"), ("128", "2"), ("assert", "#"):
        source = source.replace(long, short)
    assert "the project's: none\n" in run(source, names)
    assert called == {*SOLUTIONS}
