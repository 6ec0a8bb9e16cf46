"""The checks of notebook 6: a student's function against the project's, on hidden inputs.

    check("gae", gae)                # prints "right", or raises `Wrong`: what is wrong
    chosen = complete(gae, update)   # the functions by name; the project's instead of blanks

Each try_… function draws inputs, calls a function, and returns a dict of results and gradients.
If one wrong version in mistakes.py gives the same, its hint is given ("Hint"); otherwise, if
one has the same first difference, "Perhaps" and its hint.
"""

import math
import random
import traceback
from copy import deepcopy
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor, nn

import toy
from annotate import Span
from model import ValueHead, add_lora, load_model, lora_parameters, use_lora
from notebooks.mistakes import MISTAKES, OURS
from policy import Rollouts, add_scores, ppo_loss
from sampling import generate, pad_batch
from settings import PolicyConfig

MASK = (torch.arange(7) < torch.tensor([[7], [1], [4], [6]])).float()     # 4 rows, [B, T]


class Wrong(AssertionError):
    """A function is wrong. A notebook shows only the message, without a traceback."""

    def _render_traceback_(self):
        return [f"wrong: {self}"]


def check(name: str, function):
    """Print "right" or "not done yet", or raise `Wrong` with one line: what is wrong."""
    if is_blank(function):
        return print("not done yet")
    run = globals()[f"try_{name}"]
    for seed in range(3):
        try:
            found = run(function, seed)
        except Exception as error:
            code = function.__code__
            places = [f" in line {line - code.co_firstlineno + 1} of your function"
                      for frame, line in traceback.walk_tb(error.__traceback__)
                      if frame.f_code is code]
            message = "".join(places[:1]) + ": " + str(error).partition("\n")[0]
            raise Wrong(type(error).__name__ + message) from error
        expected = run(OURS[name], seed)
        problem = difference(found, expected, "")
        if problem:
            outcomes = {hint: run(wrong, seed) for hint, wrong in MISTAKES[name].items()}
            hints = ([f". Hint: {hint}" for hint, x in outcomes.items()
                      if not difference(found, x, "")]
                     or [f". Perhaps: {hint}" for hint, x in outcomes.items()
                         if difference(x, expected, "") == problem])
            raise Wrong(problem + (hints[0] if len(hints) == 1 else ""))
    print("right")


def complete(*functions) -> SimpleNamespace:
    """The functions by name, the project's instead of blanks. Prints which are whose."""
    yours = {f.__name__: f for f in functions if not is_blank(f)}
    ours = {f.__name__: OURS[f.__name__] for f in functions if is_blank(f)}
    print(f"yours: {', '.join(yours) or 'none'}\nthe project's: {', '.join(ours) or 'none'}")
    return SimpleNamespace(**yours, **ours)


def is_blank(function) -> bool:
    """Whether a function has only a docstring and an ellipsis, which leaves no code."""
    def blank():
        """A docstring."""
    return function.__code__.co_code == blank.__code__.co_code


# ── Comparing what came out

def difference(found, expected, name: str) -> str | None:
    """The first difference between two results, in words; None if they agree."""
    if isinstance(expected, dict):
        pairs = [(key, found[key], value) for key, value in expected.items()]
    elif isinstance(expected, (list, tuple)):
        if not isinstance(found, (list, tuple)):
            return f"{name} should be a {type(expected).__name__}, but it is {describe(found)}"
        pairs = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(found, expected))]
    elif isinstance(expected, Tensor):
        return tensor_difference(found, expected, name)
    elif not isinstance(found, (int, float)):
        return f"{name} should be a number, but it is {describe(found)}"
    else:
        is_close = math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-5)
        return None if is_close else unequal(found, expected, name)
    problem = next(filter(None, (difference(a, b, part) for part, a, b in pairs)), None)
    if not problem and len(found) != len(expected):
        return f"{name} has the wrong length: expected {len(expected)}, found {len(found)}"
    return problem


def tensor_difference(found, expected: Tensor, name: str) -> str | None:
    """`difference` from a tensor: its type, shape, dtype, and first wrong element."""
    if found is None and name.startswith("the gradient"):
        return f"{name} is missing: the result is cut off from it (detach, item, no_grad?)"
    if not isinstance(found, Tensor):
        return f"{name} should be a tensor, but it is {describe(found)}"
    if [*found.shape] != (shape := [*expected.shape]):
        return f"{name} has the wrong shape: expected {shape}, found {[*found.shape]}"
    if found.dtype != expected.dtype:
        return f"{name} has the wrong dtype: expected {expected.dtype}, found {found.dtype}"
    wrong = (~torch.isclose(found, expected, rtol=1e-3, atol=1e-5)).nonzero().tolist()
    return next((unequal(found[tuple(place)].item(), expected[tuple(place)].item(),
                         f"{name}{place or ''}") for place in wrong), None)


def unequal(found: float, expected: float, name: str) -> str:
    """Two numbers that differ, in words."""
    reason = "" if math.isfinite(found) else " (a division by 0, or exp or log of padding?)"
    return f"{name} is {found:.6g}{reason}, expected {expected:.6g}"


def describe(value) -> str:
    """The type of a value, in words."""
    return "None (is `return` missing?)" if value is None else f"a {type(value).__name__}"


# ── Hidden inputs, and what a function gives for them

def noise(seed: int, *shape) -> Tensor:
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_ids(seed: int, *lengths) -> list[list[int]]:
    """Lists of random token ids of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(2, 640) for _ in range(length)] for length in lengths]


@cache
def toy_model():
    """The toy base with a random adapter "policy"."""
    model, _ = load_model(toy.BASE, device="cpu")
    for i, p in enumerate(add_lora(model, "policy", 4, 8)):
        p.data = noise(i, *p.shape) / 30
    return model


def try_token_rewards(function, seed):
    """Texts with whitespace, spans that overlap and end inside words, and EOS without text."""
    rng = random.Random(seed)
    outcome = {}
    for _ in range(40):
        tokens = rng.choices([" a", " the", "cat", " dog", "s", ".\n", " ", "\n"], k=7)
        ends = [len("".join(tokens[:t])) for t in range(8)]
        spans = [Span(*sorted(rng.sample(range(ends[-1] + 1), 2)), rng.choice([-1, 1]))
                 for _ in range(rng.randrange(4))]
        offsets = [*zip(ends, ends[1:]), (ends[-1], ends[-1])]
        outcome[f"with the tokens {[*tokens, '']} (the last is EOS), offsets {offsets} and "
            f"{spans or 'no spans'}, the result"] = function("".join(tokens), offsets, spans)
    return outcome


def try_z_loss(function, seed):
    """Three pairs of x and z, and the gradient of two LoRA matrices."""
    pairs = [*zip(random_ids(seed, 5, 1, 9), random_ids(seed + 9, 6, 8, 1))]
    matrices = dict(zip("AB", lora_parameters(toy_model(), "policy")))
    with use_lora(toy_model(), "policy"):
        result = function(toy_model(), pairs)
    return {"the result": result} | gradients(result, matrices)


def try_lora_forward(function, seed):
    """Random matrices, and the gradients of x, A and B."""
    x, A, B = (nn.Parameter(noise(seed, *shape)) for shape in ((2, 3, 5), (2, 5), (4, 2)))
    result = function(x, noise(seed + 9, 4, 5), A, B, 5.0)
    return {"the result": result} | gradients(result, {"x": x, "A": A, "B": B})


def try_generate(function, seed):
    """Prompts of several lengths; EOS is a token that occurs; some u_t is above all sums."""
    prompts, uniforms = random_ids(seed, 6, 3, 8, 8), noise(seed, 4, 10).sigmoid()
    uniforms[2:, -1] = 1.5
    eos = generate(toy_model(), prompts, 10, 0.7, uniforms=uniforms)[0][3]
    positions = []                                  # of the columns in each call, [B, n]

    def record(_, arguments, options):              # our `Decoder` gives it as the third
        positions.append(options.get("position_ids", *arguments[2:3]).clone())

    with toy_model().model.register_forward_pre_hook(record, with_kwargs=True):
        result = function(toy_model(), prompts, uniforms, 0.7, eos)
    return {"the result": result,
            "the number of columns read beyond those needed (8 of all prompts together, then "
            "one per new token but the last)": max(0, sum(p.shape[1] for p in positions) - 17),
            "the positions of the prompts' last tokens":
                next((p[:, -1].tolist() for p in positions), [])}


def try_gae(function, seed):
    """Random rewards and values, also on the padding."""
    return {"the result": function(noise(seed, 4, 7), noise(seed + 9, 4, 7), MASK, 0.9, 0.8)}


def try_ppo_loss(function, seed):
    """Ratios inside and outside the clip range, and the gradient."""
    old = -noise(seed, 4, 7).abs()
    logprobs = (old + noise(seed + 1, 4, 7) / 2).requires_grad_()
    result = function(logprobs, old, noise(seed + 2, 4, 7), MASK, 0.2)
    return {"the result": result} | gradients(result, {"logprobs": logprobs})


def try_update(function, seed):
    """Two steps of SGD: the norms of their gradients, and the weights after each step."""
    model, head = deepcopy(toy_model()), ValueHead(128)
    theta = {f"θ, {name}": p for name, p in model.named_parameters() if p.requires_grad}
    psi = {f"ψ, {name}": p for name, p in head.named_parameters()}
    config = PolicyConfig(temperature=0.7, entropy_coef=0.3, value_coef=0.2)
    batch = Rollouts([{}] * 5, [], [], [], *pad_batch(random_ids(seed, 3, 6, 1, 4, 2),
                                                      random_ids(seed + 9, 5, 1, 7, 3, 6)))
    add_scores(batch, model, head, config)
    batch.advantages, batch.returns = (noise(seed + i, 5, 7) * batch.mask for i in (1, 2))
    for i, p in enumerate([*theta.values(), *psi.values()]):
        p.data += noise(seed + i, *p.shape) / 30                 # ρ is not 1
    optimizer = torch.optim.SGD([{"params": x.values()} for x in (theta, psi)], 0.1)
    outcome = {}
    for index, step in (([4, 0, 2], "one step"), ([1, 3], "two steps")):
        result = function(batch, index, model, head, optimizer, config,
                          lambda *terms: 2 * ppo_loss(*terms))
        outcome |= {f"after {step}, the result": result} | {
            f"after {step}, {name}": p.detach().clone() for name, p in (theta | psi).items()}
    return outcome


def gradients(result, inputs: dict) -> dict:
    """The gradient of a result's sum for each named input; None if there is none."""
    grads = [None] * len(inputs)
    if isinstance(result, Tensor) and result.requires_grad:
        grads = torch.autograd.grad(result.sum(), [*inputs.values()], allow_unused=True)
    return {f"the gradient for {name}": grad for name, grad in zip(inputs, grads)}
