"""The checks of notebook 6: what is right, what is wrong, and no false hint."""

import contextlib
import inspect
import io
import math
import re
import sys

import pytest
from helpers import ROOT

for package in ("nbformat", "IPython"):
    pytest.importorskip(package, reason=f"{package} is not installed: no notebook is tested")
import nbformat
import policy
import reward_model
from annotate import token_rewards

from notebooks import solutions
from notebooks.checks import (Wrong, cases, check, edited, results_of, same_results,
                              wrong_results)

CELLS = nbformat.read(ROOT / "notebooks" / "6_build_it_yourself.ipynb", as_version=4).cells
MISTAKES = solutions.MISTAKES
# Other right versions: the solution with an edit, or a function of the project
RIGHT = [
    ("find_spans", ("places.append((start, end))", "places.insert(0, [start, end])")),
    ("token_rewards", ("return delta", "return torch.tensor(delta, dtype=torch.float64)")),
    ("token_rewards", ("sum(labels)", "float(1 in labels) - (-1 in labels)")),
    ("z_loss", ("loss - log_p[range(len(z)), z].sum()",
                "loss - log_p.gather(1, torch.tensor(z)[:, None]).sum()")),
    ("nl_gradient", ("    return list(torch.autograd.grad(objective, parameters))",
                     "    for p in parameters:\n        p.grad = None\n"
                     "    objective.backward()\n    return tuple(p.grad for p in parameters)")),
    ("add_penalty", ("(delta - beta * log_ratio) * mask",
                     "torch.where(mask > 0, delta + beta * (logprobs_ref - logprobs_old), 0)")),
    ("gae", ("return advantages, advantages + values",
             "return [advantages.double(), (advantages + values) * mask]")),
    ("whiten", ("(variance + 1e-8).sqrt()", "(variance.sqrt() + 1e-8)")),
    ("whiten", ("mean = (advantages * mask).sum() / count",
                "mean = advantages[mask == 1].mean()")),
    ("ppo_loss", ("-(gain * mask).sum() / mask.sum()", "-gain[mask.bool()].mean()")),
    ("ppo_loss", ("torch.minimum(ratio * advantages, clipped * advantages)",
                  "torch.where(advantages > 0, ratio.clamp(max=1 + clip), ratio.clamp(min=1 - "
                  "clip)) * advantages")),
    ("update", ("    optimizer.step()\n", "    optimizer.step()\n    optimizer.zero_grad()\n")),
    ("generate", ("(sums <= u[:, None]).sum(-1, keepdim=True)",
                  "torch.searchsorted(sums, u[:, None].contiguous(), right=True)")),
    ("token_rewards", token_rewards), ("z_loss", reward_model.z_loss), ("gae", policy.gae),
    ("whiten", policy.whiten), ("ppo_loss", policy.ppo_loss),
]
# Wrong versions without a known mistake, or with two: (edits, part of the message); no hint
WRONG = [
    ("find_spans", "expected", ("response[start:end] == quote",
                                "response[start:end].lower() == quote.lower()")),
    ("token_rewards", "is 0, expected -1", ("sum(labels)", "max(0, sum(labels))")),
    ("token_rewards", "wrong length", ("in offsets", "in offsets[:-1]")),
    ("z_loss", "should be a tensor", ("return loss", "return loss.item()")),
    ("z_loss", "cut off", ("return loss", "return loss.detach()")),
    ("nl_gradient", "wrong shape", ("list(torch", "list(x.flatten() for x in torch")),
    ("gae", "expected", ("+ gamma * next_value", "+ lam * next_value")),
    ("gae", "expected", ("gamma * lam * next", "gamma * next"),
     ("advantages + values", "advantages - values")),
    ("whiten", "expected", ("** 2", "** 4")),
    ("ppo_loss", "cut off", ("(logprobs - ", "(logprobs.detach() - ")),
    ("ppo_loss", "expected", ("return -(", "return ("), ("minimum", "maximum")),
    ("update", "expected", ("config.clip)", "config.value_clip)")),
    ("update", "RuntimeError in line 2", ("loss.back", "(loss + mask).back")),
    ("lora_forward", "RuntimeError in line 3 of your", ("x @ W.T", "x @ W @ W")),
    ("generate", "columns read twice is", (
        "next_logits(model, ids, attention, positions, cache)",
        "next_logits(model, (seen := torch.cat([seen, ids], 1) if cache else ids), attention, "
        "(attention.cumsum(1) - 1).clamp(min=0), None)")),
    ("generate", "Do not draw random", (
        "(sums <= u[:, None]).sum(-1, keepdim=True)",
        "(logits / temperature).softmax(-1).multinomial(1)")),
]


def version(name: str, *edits):
    """The solution with edits, pairs (text, replacement)."""
    names = vars(solutions) | {"ppo_loss": policy.ppo_loss, "whiten": policy.whiten}
    exec(edited(inspect.getsource(getattr(solutions, name)), edits), names)
    return names[name]


def message(name: str, function) -> str:
    with pytest.raises(Wrong) as error:
        check(name, function)
    assert error.value._render_traceback_() == [f"wrong: {error.value}"]
    assert "\n────" in str(error.value), "the case is a table"
    return str(error.value)


@pytest.mark.parametrize("name, right", [*RIGHT, *((name, ("", "")) for name in MISTAKES)])
def test_what_is_right_is_accepted(name, right, capsys):
    function = right if callable(right) else version(name, *([right] if right[0] else []))
    check(name, function)
    assert capsys.readouterr().out == "right\n"


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_refused_and_no_two_look_the_same(name):
    """So each mistake gets its own hint, which is read off for the last one."""
    right = [results_of(getattr(solutions, name), case) for case in cases(name)]
    known = wrong_results(name)
    assert len(known) >= 6
    for i, (hint, results) in enumerate(known):
        assert not same_results(results, right), hint
        assert not [other for other, others in known[:i] if same_results(results, others)], hint
    hint, *edits = MISTAKES[name][-1]
    assert f"\nHint: {hint}.\n" in message(name, version(name, *edits))


@pytest.mark.parametrize("name, part, edits", [(name, part, edits)
                                               for name, part, *edits in WRONG])
def test_another_mistake_is_refused_without_a_hint(name, part, edits):
    text = message(name, version(name, *edits))
    assert re.search(part, text)
    assert "Hint" not in text or "Do not draw" in part


@pytest.mark.parametrize("name", MISTAKES)
def test_none_nan_and_a_text_are_named(name):
    for wrong, part in ((None, "None"), ("text", "should be|text|wrong length"),
                        (math.nan, "should be|Error|nan")):
        assert re.search(part, message(name, lambda *_, wrong=wrong: wrong))


def test_the_last_cells_train_with_the_students_functions():
    """A short run, in which each function of the student is called."""
    called = set()
    names = {"called": called}
    start = next(i for i, cell in enumerate(CELLS) if "= complete(" in cell.source)
    example = next(i for i, cell in enumerate(CELLS) if "# V_ψ" in cell.source)
    cells = [CELLS[i] for i in (1, example, *range(start, len(CELLS)))]
    source = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    for long, short in ("=8,", "=1,"), ("[:80]", "[:16]"), (", 96)", ", 2)"), ("assert", "#"):
        source = source.replace(long, short)
    for name in MISTAKES:
        names[f"solve_{name}"] = getattr(solutions, name)
        exec(f"def {name}(*inputs):\n    called.add('{name}')\n"
             f"    return solve_{name}(*inputs)", names)
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "path", [*sys.path])
        patch.setenv("TQDM_DISABLE", "1")
        exec(compile(source, "notebook 6", "exec"), names)
    assert "solutions: none\n" in output.getvalue()
    assert called == {*MISTAKES}
