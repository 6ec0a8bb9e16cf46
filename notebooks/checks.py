"""The checks of notebook 6: a student's function against its solution, on small inputs first.

    check("gae", gae)                # prints "right", or raises `Wrong` with the reason
    solution("gae", show=True)       # prints the solution
    chosen = complete(gae, update)   # the functions by name; a solution replaces a blank

cases_NAME() yields the inputs of an exercise, small ones first. So the first case that fails is
a small one, and it is shown as a table of tokens. Each case is used before the next one is
made, so `Case.call` may read the variables of the loop. A function must not change its inputs.
"""

import inspect
import math
import random
import traceback
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import SimpleNamespace
from typing import Callable

import torch
from torch import Tensor, nn

import toy
from annotate import Span
from model import ValueHead, add_lora, load_model, lora_parameters, use_lora
from notebooks import solutions
from policy import Rollouts, add_scores, ppo_loss
from report import table
from sampling import pad_batch
from settings import PolicyConfig


class Wrong(AssertionError):
    """A function is wrong. A notebook shows only the message, without a traceback."""

    def _render_traceback_(self):
        return [f"wrong: {self}"]


@dataclass
class Case:
    """One input of an exercise."""
    call: Callable                      # function → {name of a result: the result}
    tokens: dict[str, list]             # columns of the table: one value per token
    title: str = ""                     # inputs that are not per token


# ── Checking a function

def check(name: str, function):
    """Print "right" or "not done yet", or raise `Wrong` with what is wrong and where."""
    if is_blank(function):
        return print("not done yet")
    for case in globals()[f"cases_{name}"]():
        expected = results_of(getattr(solutions, name), case)
        found = results_of(function, case)
        if isinstance(found, Exception):
            problem = error_message(function, found)
        else:
            problem = difference(found, expected)
        if problem:
            again = results_of(function, case, seed=1)
            if isinstance(found, dict) and repr(again) != repr(found):
                problem += "\nA second call with the same inputs gives other results."
            raise Wrong("\n".join([problem, "", *show(case, found, expected)]))
    print("right")


def solution(name: str, show: bool):
    """Print the solution of an exercise, if it is to be shown."""
    if show:
        print(inspect.getsource(getattr(solutions, name)))


def complete(*functions) -> SimpleNamespace:
    """The functions by name; solutions replace blanks. Prints which are the student's."""
    yours = {f.__name__: f for f in functions if not is_blank(f)}
    blanks = {f.__name__: getattr(solutions, f.__name__) for f in functions if is_blank(f)}
    print(f"yours: {', '.join(yours) or 'none'}\nsolutions: {', '.join(blanks) or 'none'}")
    return SimpleNamespace(**yours, **blanks)


def is_blank(function) -> bool:
    """Whether a function is only a docstring and an ellipsis: its bytecode is then empty."""
    def blank():
        """A docstring."""
    return function.__code__.co_code == blank.__code__.co_code


def results_of(function, case: Case, seed: int = 0):
    """The results of a function in a case, or the exception that it raises: `Wrong` if it
    changed an input."""
    def guarded(*inputs):
        before = [flat(value) for value in inputs]
        result = function(*inputs)
        for name, value, old in zip(function.__code__.co_varnames, inputs, before):
            if flat(value) != old:
                raise Wrong(f"your function changed its input {name}")
        return result

    torch.manual_seed(seed)
    try:
        return case.call(guarded)
    except Exception as error:
        return error


def error_message(function, error: Exception) -> str:
    """The type of an exception, its line in the student's function, and the first line of its
    message. If it is `Wrong`, only the message."""
    if isinstance(error, Wrong):
        return str(error)
    code = function.__code__
    places = [f"in line {line - code.co_firstlineno + 1} of your function"
              for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    message = str(error).partition("\n")[0]
    return f"{type(error).__name__} {[*places, 'outside your function'][0]}: {message}"


# ── Comparing results

def difference(found, expected, name: str = "") -> str | None:
    """The first difference between two results, in words; None if they agree.

    Lists and tuples of the same numbers agree, and so do integers and floats of the same value.
    A tensor or array agrees with an expected list of integers, but not with one of floats.
    """
    if isinstance(expected, dict):
        for key in found | expected:              # a Counter has a 0 for each key that it lacks
            problem = difference(found[key], expected[key], key)
            if problem:
                return problem
        return None
    if found is None:
        reason = " (the result does not depend on it; detach, item, no_grad?)"
        return f"{name} is None{reason if 'gradient' in name else ''}"
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            return f"{name} should be a tensor, but it is a {type(found).__name__}"
        if found.shape != expected.shape:
            return (f"{name} has the wrong shape: expected {list(expected.shape)}, "
                    f"found {list(found.shape)}")
    if isinstance(expected, Tensor) or isinstance([*flat(expected), 0][0], int):
        found = as_list(found)
        expected = as_list(expected)
    if isinstance(expected, (list, tuple)):
        if not isinstance(found, (list, tuple)):
            return f"{name} should be a list, but it is a {type(found).__name__}"
        return list_difference(found, expected, name)
    if not isinstance(found, (int, float)):
        return f"{name} should be a Python number, but it is {found!r}"
    if not math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-5):
        return f"{name} is {found:.6g}, expected {expected:.6g}"


def as_list(value):
    """A tensor or array as lists of numbers, or as a number; a dataclass as its values."""
    if is_dataclass(value):
        return [*vars(value).values()]
    return value.tolist() if hasattr(value, "tolist") else value


def list_difference(found, expected, name: str) -> str | None:
    """`difference` of two lists: of their first elements that differ, or of their lengths."""
    for i, (a, b) in enumerate(zip(found, expected)):
        problem = difference(a, b, f"{name}[{i}]")
        if problem:
            return problem
    if len(found) != len(expected):
        return f"{name} has the wrong length: expected {len(expected)}, found {len(found)}"


def show(case: Case, found, expected: dict) -> list[str]:
    """The lines of a case: its title, result lists, and a table of its tokens. With two tokens
    or more, the table also has the results that have one number per token."""
    lines = case.title.splitlines()
    columns = dict(case.tokens)
    length = len(next(iter(columns.values())))
    for name, value in expected.items() if not isinstance(found, Exception) else ():
        yours = flat(found[name])
        if name == "result" and isinstance(value, list):
            lines += [f"your result: {found[name]}", f"expected:    {value}"]
        elif 1 < length == len(yours) == len(flat(value)):
            columns[f"your {name}"] = yours
            columns[name] = flat(value)
    return [*lines, table(list(columns), list(zip(*columns.values())))]


def flat(value) -> list:
    """The numbers of a tensor, list or dataclass as one list; a number is a list of one."""
    value = as_list(value)
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in flat(part)]
    return [value]


# ── Inputs: drawn numbers have one decimal, so that a reader can follow

def draw(rng: random.Random, lengths: list[int], low: float, high: float) -> Tensor:
    """Random numbers with one decimal, [rows, longest], also on the padding."""
    return torch.tensor([[round(rng.uniform(low, high), 1) for _ in range(max(lengths))]
                         for _ in lengths])


def batch_case(names: list[str], inputs: dict, lengths: list[int], constants: dict,
               has_gradient: bool = False) -> Case:
    """A case of a function of tensors [B, T], the mask of B responses, and constants.

    names: the names of the results. has_gradient: whether the gradient for the first tensor is
    a result, too. If so, the tensors of a single row are [T].
    """
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()       # [B, T]
    B, T = mask.shape
    first, *others = [x[0] if has_gradient and B == 1 else x for x in (*inputs.values(), mask)]

    def call(function):
        leaf = first.clone().requires_grad_(has_gradient)
        found = function(leaf, *others, *constants.values())
        if len(names) == 1:
            found = [found]
        if not isinstance(found, (tuple, list)) or len(found) != len(names):
            raise Wrong(f"({', '.join(names)}) was expected, but your result is {found!r}")
        grads = gradients(found[0], {[*inputs][0]: leaf}) if has_gradient else {}
        return dict(zip(names, found)) | grads

    columns = {"row": [b for b in range(B) for _ in range(T)], "t": [*range(1, T + 1)] * B,
               "mask": [int(m) for m in flat(mask)]}
    title = [f"{name} = {value}" for name, value in constants.items()]
    return Case(call, columns | {name: flat(x) for name, x in inputs.items()},
                ", ".join([f"shape {[*first.shape]}", *title]))


def gradients(result, inputs: dict) -> dict:
    """The gradient of a result for each named input; None if there is none."""
    grads = [None] * len(inputs)
    if isinstance(result, Tensor) and result.requires_grad:
        grads = torch.autograd.grad(result.sum(), [*inputs.values()], allow_unused=True)
    return {f"gradient for {name}": grad for name, grad in zip(inputs, grads)}


def random_ids(rng: random.Random, *lengths) -> list[list[int]]:
    """Lists of random token ids of these lengths; many are 0 (padding) or 1 (EOS)."""
    return [rng.choices([0, 1, 40, 300, 500], k=length) for length in lengths]


def randomise(weights, seed: int):
    """Set weights to small random numbers."""
    generator = torch.Generator().manual_seed(seed)
    for p in weights:
        p.data = torch.randn(p.shape, generator=generator) / 30


@cache
def toy_model():
    """The toy base with a random adapter "policy"."""
    model, _ = load_model(toy.BASE, device="cpu")
    randomise(add_lora(model, "policy", 4, 8), seed=0)
    return model


# ── The cases of each exercise

def cases_find_spans():
    """Random texts with quotes from them. Some are repeated or have the wrong case."""
    rng = random.Random(0)
    for i in range(500):
        response = "".join(rng.choices(rng.choice(["aabA é3_.'-  ", "a "]), k=1 + i // 50))
        quotes = []
        for _ in range(i % 3):
            start = rng.randrange(len(response))
            quote = rng.choice([response, response, response.swapcase()])[start:][:3]
            quotes += [quote] * rng.randint(1, 3)

        def call(function):
            result = function(response, quotes)
            try:
                spans = sorted((int(start), int(end)) for start, end in result)
            except (TypeError, ValueError):
                raise Wrong(f"a list of (start, end) was expected, but your result is "
                            f"{result!r}") from None
            return {"spans": Counter(f"number of spans {span}" for span in spans),
                    "result": spans}
        columns = {"character": [*map(repr, response)], "place": [*range(len(response))]}
        yield Case(call, columns, f"response: {response!r}\nquotes: {quotes}")


def cases_token_rewards():
    """Random tokens and spans: whitespace, parts of tokens, conflicts, with and without EOS."""
    rng = random.Random(0)
    words = ["cat", " cat", "cat ", " ", ".\n", "\n\n", "  é", "\ta", "é"]
    for i in range(500):
        tokens = rng.choices(words, k=1 + i // 125) + [""] * rng.randint(0, 1)    # "" is EOS
        text = "".join(tokens)
        ends = [len("".join(tokens[:t])) for t in range(len(tokens) + 1)]
        offsets = [*zip(ends, ends[1:])]
        spans = [Span(*sorted(rng.sample(range(len(text) + 1), 2)), rng.choice([-1, 1]))
                 for _ in range(i % 6)]
        title = [f"span: {text[span.start : span.end]!r}, start {span.start}, end {span.end}, "
                 f"label {span.label:+d}" for span in spans]
        yield Case(lambda function: {"δ": function(text, offsets, spans)},
                   {"token": [repr(token) if token else "EOS" for token in tokens],
                    "start": ends[:-1], "end": ends[1:]}, "\n".join(title))


def cases_z_loss():
    """Pairs of a prompt and z, a second one twice. Results: loss, gradients for LoRA's A, B."""
    rng = random.Random(0)
    for lengths in ([(1, 1)], [(2, 1)], [(1, 2)], [(3, 6)], [(2, 3), (3, 1)], [(1, 5), (4, 2)]):
        pairs = [tuple(random_ids(rng, x, z)) for x, z in lengths]
        pairs += pairs[1:]

        def call(function):
            matrices = dict(zip("AB", lora_parameters(toy_model(), "policy")))
            with use_lora(toy_model(), "policy"):
                result = function(toy_model(), pairs)
            return {"loss": result} | gradients(result, matrices)
        rows = [(number, part, token) for number, pair in enumerate(pairs)
                for part, ids in zip(("x, y", "z"), pair) for token in ids]
        yield Case(call, dict(zip(("pair", "part", "token id"), zip(*rows))))


def cases_nl_gradient():
    """A linear layer that reads two features per token and writes one of three words."""
    rng = random.Random(0)
    for delta in ([1.0], [-1.0], [1.0, 0.0], [1.0, -1.0, 0.0, 1.0], [0.0, 0.0]):
        T = len(delta)
        features = draw(rng, [2] * T, -1, 1)                                       # [T, 2]
        start = [draw(rng, shape, -1, 1) for shape in ([2, 2, 2], [3], [1])]
        words = [rng.randrange(3) for _ in delta]

        def logprobs_of(W, bias, scale):
            return (scale * (features @ W.T + bias)).log_softmax(-1)[range(T), words]     # [T]

        def call(function):
            parameters = [nn.Parameter(x.clone()) for x in start]
            for p in parameters:
                p.grad = torch.ones_like(p)
            return {"g_NL": function(logprobs_of(*parameters), torch.tensor(delta), parameters)}
        yield Case(call, {"t": [*range(1, T + 1)], "δ": delta,
                          "log π": logprobs_of(*start).tolist()},
                   "parameters: W [3, 2], bias [1, 3], scale [1, 1]; p.grad is 1 before")


def cases_add_penalty():
    """Tokens where the policy is above and below the reference; the padding holds numbers."""
    rng = random.Random(0)
    for lengths, beta, low in (([1], 0.5, -3), ([1], 0.5, -3), ([3], 0.0, -3),
                               ([1, 2], 0.1, -3), ([4, 2, 3], 0.5, -300)):
        inputs = {"δ": draw(rng, lengths, -1, 1).round(),
                  "log π_old": draw(rng, lengths, low, -0.1),
                  "log π_ref": draw(rng, lengths, low, -0.1)}
        yield batch_case(["r"], inputs, lengths, {"β": beta})


def cases_gae():
    """One token, then more; the padding of shorter rows holds numbers."""
    rng = random.Random(0)
    for lengths, gamma, lam in (([1], 0.9, 0.8), ([2], 0.9, 0.8), ([3], 0.9, 0.0),
                                ([3], 0.0, 0.8), ([1, 2], 0.9, 0.8), ([4, 1, 3], 1.0, 0.7)):
        inputs = {"r": draw(rng, lengths, -1, 1), "V": draw(rng, lengths, -1, 1)}
        yield batch_case(["A", "R"], inputs, lengths, {"γ": gamma, "λ": lam})


def cases_whiten():
    """One row, then rows of different lengths, whose padding holds numbers. Small numbers, and
    large ones with small differences."""
    rng = random.Random(38)
    for lengths, scale, shift in (([2], 1, 0), ([3], 0.01, 0), ([3], 0.1, 100), ([1, 2], 1, 0),
                                  ([4, 2, 3], 1, 0)):
        advantages = draw(rng, lengths, -1.4, 2.4).round() ** 3 * scale + shift
        yield batch_case(["Â"], {"A": advantages}, lengths, {})


def cases_ppo_loss():
    """One token with various ρ and A, then more tokens; the padding holds numbers."""
    rng = random.Random(0)
    for lengths in *[[1]] * 8, [3], [1, 2], [4, 1, 3], [5, 5, 2, 4]:
        old = draw(rng, lengths, -2, -1)
        log_ratio = draw(rng, lengths, -0.8, 0.8)
        case = batch_case(["loss"], {"log π": old + log_ratio, "log π_old": old,
                                     "A": draw(rng, lengths, -2, 2)},
                          lengths, {"ε": 0.1 + len(lengths) / 10}, has_gradient=True)
        case.tokens["ρ"] = flat(log_ratio.exp())
        yield case


def cases_update():
    """A step on one token, on a longer row and on more rows, and two steps in a row. One
    gradient norm is below 1, so it is not clipped. SGD with momentum shows whether the function
    uses the optimizer for each step."""
    rng = random.Random(2)
    lengths = [1, 3, 7, 2, 6]
    prompts = random_ids(rng, 3, 6, 1, 4, 2)
    responses = random_ids(rng, *lengths)
    config = PolicyConfig(temperature=0.7, entropy_coef=0.03, value_coef=0.06, clip=0.2,
                          value_clip=0.5)
    batch = Rollouts([{}] * 5, [], [], [], *pad_batch(prompts, responses))
    start = deepcopy(toy_model()), ValueHead(128)
    add_scores(batch, *start, config)
    batch.values = draw(rng, lengths, -1, 1)
    batch.advantages = draw(rng, lengths, -2, 2)
    batch.returns = draw(rng, lengths, -2, 2)
    randomise(lora_parameters(start[0], "policy"), seed=1)       # so that ρ is not 1
    start[1].linear.weight.data = draw(rng, [128], -0.2, 0.2)
    for steps in ([[0]], [[1]], [[4, 0, 2]], [[4, 0, 2], [1, 3]]):
        def call(function):
            models = model, head = deepcopy(start)
            groups = [lora_parameters(model, "policy"), [*head.parameters()]]
            before = deepcopy(groups)
            for p in [*model.parameters(), *head.parameters()]:
                p.grad = torch.ones_like(p)
            optimizer = torch.optim.SGD([{"params": group} for group in groups], 1, 0.9)
            norms = [function(batch, index, *models, optimizer, config,
                              lambda *terms, **named: 0.2 * ppo_loss(*terms, **named))
                     for index in steps]
            changes = {f"change of {name}": [p - old for p, old in zip(*pair)]
                       for name, *pair in zip("θψ", groups, before)}
            return {"norm": norms} | changes
        index = steps[-1]
        picked = batch.mask[index].bool()
        columns = {"row": [i for i in index for _ in range(lengths[i])]}
        columns |= {name: tensor[index][picked].tolist() for name, tensor in {
            "log π_old": batch.logprobs_old, "Â": batch.advantages, "V_old": batch.values,
            "R": batch.returns}.items()}
        yield Case(call, columns, f"rows of each step: {steps}; p.grad is 1 before")


def cases_lora_forward():
    """One vector, then a batch, and the gradients of x and the two matrices."""
    rng = random.Random(0)
    for shape, features, rank, outputs in (((), 1, 1, 1), ((), 1, 3, 2), ((2, 3), 5, 2, 4)):
        numbers = {"x": draw(rng, [features] * math.prod(shape), -2, 2).view(*shape, features),
                   "W": draw(rng, [features] * outputs, -2, 2),
                   "down": draw(rng, [features] * rank, -2, 2),
                   "up": draw(rng, [rank] * outputs, -2, 2)}

        def call(function):
            x, W, down, up = (tensor.clone().requires_grad_() for tensor in numbers.values())
            result = function(x, W.detach(), down, up, 2.5)
            return {"result": result} | gradients(result, {"x": x, "down": down, "up": up})
        columns = {"input": [*numbers], "shape": [str([*x.shape]) for x in numbers.values()],
                   "first number": [flat(x)[0] for x in numbers.values()]}
        yield Case(call, columns, f"α = 2.5, r = {rank}")


def cases_generate():
    """One short prompt, then several; one prompt in each case has EOS.

    Token ids below 7 have probability 0, so a cumulative sum can equal u = 0. At the first τ
    all other ids are equally likely. Rounding then leaves no cumulative sum above the largest
    u.
    """
    rng = random.Random(3)
    model, _ = load_model(toy.BASE, device="cpu")
    model.lm_head.register_forward_hook(
        lambda module, inputs, logits: logits.index_fill(-1, torch.arange(7), -math.inf))
    calls = []                  # of the model: columns; mask and position of the last

    def record(module, arguments, options):
        last = [None if options[name] is None else options[name][:, -1].tolist()
                for name in ("attention_mask", "position_ids")]
        calls.append((options["input_ids"].shape[1], *last))

    model.model.register_forward_pre_hook(record, with_kwargs=True)
    for lengths, T, temperature, ending in (
            ([2], 1, 1e12, 0), ([2], 2, 0.7, 0), ([1], 4, 0.7, 0), ([1, 5], 4, 0.7, 1),
            ([6, 3, 8, 1], 10, 0.7, 0)):
        prompts = random_ids(rng, *lengths)
        uniforms = draw(rng, [T] * len(lengths), 0.1, 0.9)
        uniforms[-1, T // 3] = 0.0 if T > 1 else 1 - 2**-24
        # This token ends the answer of one row, and is also in a prompt.
        eos = solutions.generate(model, prompts, uniforms, temperature, -1)[ending][T // 2]
        prompts[ending - 1][0] = eos

        def call(function):
            calls.clear()
            result = function(model, prompts, uniforms, temperature, eos)
            widths = [width for width, _, _ in calls]
            _, attention, positions = [*calls, [None] * 3][0]
            # If all rows have ended, a call that is left out counts as a call of one column.
            return {"columns of each call": widths and widths + [1] * (T - len(widths)),
                    "attention in the last column of the first call": attention,
                    "position in the last column of the first call": positions,
                    "result": result}
        columns = {"row": [i for i in range(len(prompts)) for _ in range(T)],
                   "t": [*range(1, T + 1)] * len(prompts), "u": flat(uniforms)}
        yield Case(call, columns, f"prompts: {prompts}\nEOS: {eos}, τ = {temperature:g}, "
                   f"largest u = {uniforms.max():.8f}")
