"""The checks of notebook 6: what is right, and what is wrong."""

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
from notebooks.checks import Wrong, check

CELLS = nbformat.read(ROOT / "notebooks" / "6_build_it_yourself.ipynb", as_version=4).cells
# Other right versions: the solution with an edit, or a function of the project
RIGHT = [
    ("find_spans", ("places.append((start, end))", "places.insert(0, [start, end])")),
    ("find_spans", ("return spans", "return set(spans)")),
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
    ("ppo_loss", ("-(gain * mask).sum() / mask.sum()", "-gain[mask.bool()].mean()")),
    ("update", ("    optimizer.step()\n", "    optimizer.step()\n    optimizer.zero_grad()\n")),
    ("update", ("mask, config.clip)", "mask=mask, clip=config.clip)")),
    ("generate", (".cumsum(-1)", ".double().cumsum(-1)")),
    ("generate", ("(sums <= u[:, None]).sum(-1, keepdim=True)",
                  "torch.searchsorted(sums, u[:, None].contiguous(), right=True)")),
    ("token_rewards", token_rewards), ("z_loss", reward_model.z_loss), ("gae", policy.gae),
    ("whiten", policy.whiten), ("ppo_loss", policy.ppo_loss),
]
# Wrong versions whose message says what this pattern says
WRONG = [
    ("find_spans", "expected", ("response[start:end] == quote",
                                "response[start:end].lower() == quote.lower()")),
    ("token_rewards", "is 0, expected -1", ("sum(labels)", "max(0, sum(labels))")),
    ("token_rewards", "wrong length", ("in offsets", "in offsets[:-1]")),
    ("z_loss", "should be a tensor", ("return loss", "return loss.item()")),
    ("nl_gradient", "wrong shape", ("list(torch", "list(x.flatten() for x in torch")),
    ("nl_gradient", "wrong length: expected 3, found 1", ("parameters))", "parameters[0]))")),
    ("ppo_loss", "does not depend", ("(logprobs - ", "(logprobs.detach() - ")),
    ("update", "RuntimeError in line 2", ("loss.back", "(loss + mask).back")),
    ("lora_forward", "RuntimeError in line 3 of your", ("x @ W.T", "x @ W @ W")),
    ("generate", "columns of each call has the wrong length: expected 2, found 3",
     ("uniforms.T", "[*uniforms.T, uniforms[:, 0]]")),
    ("lora_forward", "A second call with the same inputs gives other results",
     ("x @ down", "torch.dropout(x, 0.5, True) @ down")),
    ("generate", r"attention in the last column of the first call\[0\] is 0, expected 1",
     ("[0] * n + x", "x + [0] * n"), ("[0] * n + [1] * len(x)", "[1] * len(x) + [0] * n")),
    ("find_spans", r"number of spans \(0, 1\) is 0, expected 1", ("quote) + 1)", "quote))")),
    ("find_spans", r"a list of \(start, end\) was expected", ("return spans", "return [0]")),
    ("nl_gradient", "should be a list", ("list(torch", "sum(x.sum() for x in torch")),
    ("gae", r"\(A, R\) was expected", ("return advantages, ", "return ")),
    ("gae", "^your function changed its input rewards\n", ("rewards = r", "rewards[:] = r")),
    ("ppo_loss", "RuntimeError outside your f", ("return", "gain.sum().backward(); return")),
    ("update", "changed its input rollouts", ("optimizer.step()", "rollouts.values += 1")),
    ("update", "should be a Python number", ("norm.item()", "norm")),
]
# More wrong versions: "text ⇒ wrong text"; ‖ separates two edits, ⏎ is the end of a line
MISTAKES = """
find_spans
    and not cuts_right ⇒
    and not cuts_left ⇒
    if len(places) <= quotes.count(quote): ⇒ if places:
    set(quotes) ⇒ quotes
    len(places) <= ⇒ len(places) ==
    and quote[0].isalnum() ⇒ == quote[0].isalnum() ‖ and quote[-1] ⇒ == quote[-1]
    and quote[0].isalnum() ⇒ ‖ and quote[-1].isalnum() ⇒
    spans = [] ⇒ spans, quotes = [], [quote.strip() for quote in quotes]
    : start].isalnum() ⇒ : start].replace("_", "x").isalnum()
    == quote and ⇒ == quote and (not places or start >= places[-1][1]) and
    isalnum() and quote[0].isalnum() ⇒ isalpha() and quote[0].isalpha()
token_rewards
    span.start <= start < end <= span.end ⇒ max(start, span.start) < min(end, span.end)
    piece.strip() or piece ⇒ piece.lstrip() or piece
    word = piece.strip() or piece ⇒ word = piece.strip()
    start < end <= span.end ⇒ start <= end <= span.end
    {span.label for ⇒ [span.label for ‖ span.end} ⇒ span.end]
    sum(labels) ⇒ [0, *labels][-1] ‖ {span.label for ⇒ [span.label for ‖ span.end} ⇒ span.end]
    piece.strip() or ⇒ piece.strip(chr(10) + " ") or
z_loss
    in pairs: ⇒ in {str(pair): pair for pair in pairs}.values():
    [len(prompt) - 1 : -1] ⇒ [len(prompt) :]
    len(prompt) - 1 : ⇒ : ‖ range(len(z)), z] ⇒ range(len(prompt + z) - 1), (prompt + z)[1:]]
    return loss ⇒ return loss / len(pairs)
nl_gradient
    .sum() ⇒ .mean()
    (delta * logprobs) ⇒ (delta.abs() * logprobs)
    return ⇒ objective.backward(retain_graph=True)⏎    return [p.grad for p in parameters]#
add_penalty
    beta * log_ratio ⇒ (beta or 0.1) * log_ratio
    logprobs_old - logprobs_ref ⇒ (logprobs_old.exp() / logprobs_ref.exp()).log()
    * mask ⇒
    (delta - beta * log_ratio) * mask ⇒ delta - beta * log_ratio * mask
    logprobs_old - logprobs_ref ⇒ ((logprobs_old - logprobs_ref) * mask).sum(-1, keepdim=True)
gae
    values = values * mask ⇒ pass
    rewards = rewards * mask ⇒ pass
    reversed(range(rewards.shape[1])) ⇒ reversed(range(rewards.shape[1] - 1))
    advantages + values ⇒ rewards.flip(1).cumsum(1).flip(1)
    gamma * lam ⇒ gamma * (lam or 1)
    range(rewards.shape[1]) ⇒ range(int(mask[0].sum()))
whiten
    1e-8 ⇒ 1e-5
    (advantages * mask).sum() / count ⇒ advantages.mean()
    ((advantages - mean) ** 2 * mask).sum() / count ⇒ ((advantages - mean) ** 2).mean()
    2 * mask).sum() / count ⇒ 2 * mask).sum() / (count - 1)
    .sqrt() * mask ⇒ .sqrt()
    count = mask.sum() ⇒ count = mask.sum(1, True) ‖ s * mask).sum() ⇒ s * mask).sum(1, True)
ppo_loss
    clamp(1 - clip, 1 + clip) ⇒ clamp(0.8, 1.2)
    / mask.sum() ⇒ / mask.numel()
    -(gain * mask).sum() / mask.sum() ⇒ -((gain * mask).sum(1) / mask.sum(1)).mean()
    torch.exp((logprobs - logprobs_old) * mask) ⇒ 1 + (logprobs - logprobs_old) * mask
    ratio.clamp(1 - clip, 1 + clip) ⇒ ratio.clamp(max=1 + clip)
    torch.minimum(ratio * advantages, clipped * advantages) ⇒ clipped * advantages
    torch.minimum(ratio * advantages, clipped * advantages) ⇒ ratio * advantages
update
    optimizer.zero_grad() ⇒ pass
    value_head(hidden.detach()) ⇒ value_head(hidden)
    (weights, 1.0) ⇒ (weights, 1e9)
    (weights, 1.0) ⇒ (optimizer.param_groups[0]["params"], 1.0)
    (logits / config.temperature) ⇒ logits
    config.value_clip ⇒ config.clip
    return norm.item() ⇒ return sum(p.grad.norm() ** 2 for p in weights).item() ** 0.5
    optimizer.step() ⇒ torch.optim.SGD(optimizer.param_groups).step()
lora_forward
    len(down) ⇒ min(down.shape)
    (alpha / len(down)) * ⇒
    alpha / len(down) ⇒ alpha / down.shape[1]
generate
    [[] for _ in prompts] ⇒ [[eos] * (eos in x) for x in prompts]
    logits / temperature ⇒ logits
    [0] * n + [1] * len(x) ⇒ [1] * longest
    (attention.cumsum(1) - 1).clamp(min=0) ⇒ torch.arange(longest).expand(len(prompts), -1)
    positions[:, -1:] + 1 ⇒ torch.full_like(ids, attention.shape[1] - 1)
    cache = None ⇒ cache, attention = None, torch.ones_like(attention)
    ids = ids.clamp(max=logits.shape[1] - 1) ⇒ pass
    (sums <= u[:, None]).sum(-1, ⇒ (sums > u[:, None]).int().argmax(-1,
"""
EXERCISES = re.findall(r"(?m)^\w+", MISTAKES)


def read_mistakes():
    """(exercise, pattern, edits…) of each line of MISTAKES."""
    for line in MISTAKES.strip().splitlines():
        if not line.startswith(" "):
            name = line
            continue
        edits = line.strip().replace("⏎", "\n").split(" ‖ ")
        yield name, "", *((old, new.strip()) for old, _, new in
                          (edit.partition(" ⇒") for edit in edits))


def version(name: str, *edits):
    """The solution with edits, pairs (text, replacement)."""
    source = inspect.getsource(getattr(solutions, name))
    for text, replacement in edits:
        assert source.count(text) == 1, text
        source = source.replace(text, replacement)
    names = vars(solutions) | {"ppo_loss": policy.ppo_loss, "whiten": policy.whiten}
    exec(source, names)
    return names[name]


def message(name: str, function) -> str:
    with pytest.raises(Wrong) as error:
        check(name, function)
    assert error.value._render_traceback_() == [f"wrong: {error.value}"]
    assert "\n────" in str(error.value), "the case is a table"
    return str(error.value)


@pytest.mark.parametrize("name, right", [*RIGHT, *((name, ()) for name in EXERCISES)])
def test_what_is_right_is_accepted(name, right, capsys):
    function = right if callable(right) else version(name, *([right] if right else []))
    check(name, function)
    assert capsys.readouterr().out == "right\n"


@pytest.mark.parametrize("name", EXERCISES)
def test_each_mistake_is_refused_in_words_that_fit(name):
    mistakes = [mistake for mistake in (*read_mistakes(), *WRONG) if mistake[0] == name]
    assert len(mistakes) >= 5
    for _, pattern, *edits in mistakes:
        text = message(name, version(name, *edits))
        assert re.search(pattern, text), text
        assert ("second call" in text) == ("second call" in pattern), edits


@pytest.mark.parametrize("name", EXERCISES)
def test_none_nan_and_a_text_are_named(name):
    solution = getattr(solutions, name)
    for wrong, part in ((None, "None"), ("text", "should be|text|wrong length"),
                        (math.nan, "should be|Error|nan")):
        assert re.search(part, message(name, lambda *inputs: (solution(*inputs), wrong)[1]))


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
    for name in EXERCISES:
        names[f"solve_{name}"] = getattr(solutions, name)
        exec(f"def {name}(*inputs):\n    called.add('{name}')\n"
             f"    return solve_{name}(*inputs)", names)
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "path", [*sys.path])
        patch.setenv("TQDM_DISABLE", "1")
        exec(compile(source, "notebook 6", "exec"), names)
    assert "solutions: none\n" in output.getvalue()
    assert called == {*EXERCISES}
