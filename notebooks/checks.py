"""The checks of notebook 6: a student's function against its solution, on small inputs first.

    check("gae", gae)                # prints "right", or raises `Wrong`: what is wrong
    solution("gae", show=True)       # prints the solution
    chosen = complete(gae, update)   # the functions by name; the solution instead of a blank

cases_NAME() gives the inputs of an exercise from the smallest on, so the first failing case is
a small one. It is shown as a table of tokens. Each case is used before the next one is made, so
its function may read the variables of the loop.
"""

import inspect
import math
import random
import traceback
from copy import deepcopy
from dataclasses import dataclass
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
            if isinstance(again, dict) and difference(again, found):
                problem += "\nA second call with the same inputs gives other results."
            raise Wrong("\n".join([problem, "", *show(case, found, expected)]))
    print("right")


def solution(name: str, show: bool):
    """Print the solution of an exercise, if it is to be shown."""
    if show:
        print(inspect.getsource(getattr(solutions, name)))


def complete(*functions) -> SimpleNamespace:
    """The functions by name, the solution instead of a blank. Prints which are whose."""
    yours = {f.__name__: f for f in functions if not is_blank(f)}
    blanks = {f.__name__: getattr(solutions, f.__name__) for f in functions if is_blank(f)}
    print(f"yours: {', '.join(yours) or 'none'}\nsolutions: {', '.join(blanks) or 'none'}")
    return SimpleNamespace(**yours, **blanks)


def is_blank(function) -> bool:
    """Whether a function has only a docstring and an ellipsis, which leaves no code."""
    def blank():
        """A docstring."""
    return function.__code__.co_code == blank.__code__.co_code


def results_of(function, case: Case, seed: int = 0):
    """The results of a function in a case, or the exception that it raises."""
    torch.manual_seed(seed)
    try:
        return case.call(function)
    except Exception as error:
        return error


def error_message(function, error: Exception) -> str:
    """The type of an exception, its line in the student's function, and its first line."""
    code = function.__code__
    lines = [f" in line {line - code.co_firstlineno + 1} of your function"
             for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    message = str(error).partition("\n")[0]
    return f"{type(error).__name__}{''.join(lines[:1])}: {message}"


# ── Comparing results

def difference(found, expected, name: str = "") -> str | None:
    """The first difference between two results, in words; None if they agree.

    Lists, tuples and tensors of the same numbers agree, and so do all types of numbers.
    """
    if isinstance(expected, dict):
        for key, value in expected.items():
            problem = difference(found[key], value, key)
            if problem:
                return problem
        return None
    if found is None and expected is not None:
        reason = "the result does not depend on it; detach, item, no_grad?"
        if "gradient" not in name:
            reason = "is `return` missing?"
        return f"{name} is None ({reason})"
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            return f"{name} should be a tensor, but it is a {type(found).__name__}"
        if found.shape != expected.shape:
            return (f"{name} has the wrong shape: expected {list(expected.shape)}, "
                    f"found {list(found.shape)}")
    found = as_list(found)
    expected = as_list(expected)
    if isinstance(expected, (list, tuple)):
        if not isinstance(found, (list, tuple)):
            return f"{name} should be a list, but it is {found!r}"
        return list_difference(found, expected, name)
    return number_difference(found, expected, name)


def as_list(value):
    """A tensor or array as lists of numbers, or as a number."""
    return value.tolist() if hasattr(value, "tolist") else value


def list_difference(found, expected, name: str) -> str | None:
    """`difference` of two lists: of their first elements that differ, or of their lengths."""
    for i, (a, b) in enumerate(zip(found, expected)):
        problem = difference(a, b, f"{name}[{i}]")
        if problem:
            return problem
    if len(found) != len(expected):
        return f"{name} has the wrong length: expected {len(expected)}, found {len(found)}"


def number_difference(found, expected, name: str) -> str | None:
    """`difference` of two numbers."""
    if not isinstance(expected, (int, float)):
        return None if found == expected else f"{name} is {found!r}, expected {expected!r}"
    if found != found and expected != expected:                               # two NaN
        return None
    if not isinstance(found, (int, float)):
        return f"{name} should be a number, but it is {found!r}"
    if math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-5):
        return None
    return f"{name} is {found:.6g}, expected {expected:.6g}"


def show(case: Case, found, expected: dict) -> list[str]:
    """The lines of a case: its title, lists, and a table of its tokens with all results per
    token."""
    lines = case.title.splitlines()
    columns = dict(case.tokens)
    length = len(next(iter(columns.values())))
    for name, value in expected.items() if not isinstance(found, Exception) else ():
        yours = flat(found[name])
        if len(flat(value)) == len(yours) == length:
            columns[f"your {name}"] = yours
            columns[name] = flat(value)
        elif name == "result" and isinstance(value, list):
            is_right = not difference(found[name], value)
            lines += ["your result is right; the first line is not"] if is_right else [
                f"your result: {found[name]}", f"expected:    {value}"]
    return [*lines, table(list(columns), list(zip(*columns.values())))]


def flat(value) -> list:
    """The numbers of a tensor or list as one list; a number is a list of one."""
    value = as_list(value)
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in flat(part)]
    return [value]


# ── Inputs: drawn numbers have one decimal, so that a reader can follow

def draw(rng: random.Random, lengths: list[int], low: float, high: float) -> Tensor:
    """Random numbers with one decimal, [rows, longest], also on the padding."""
    return torch.tensor([[round(rng.uniform(low, high), 1) for _ in range(max(lengths))]
                         for _ in lengths])


def batch_case(names: list[str], inputs: dict, lengths: list[int], constants: list,
               title: str = "", has_gradient: bool = False) -> Case:
    """A case of a function of tensors [B, T], the mask of B responses, and constants.

    names: of its results. has_gradient: whether a gradient for the first tensor is a result.
    """
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()       # [B, T]

    def call(function):
        tensors = [x.clone() for x in inputs.values()]
        tensors[0].requires_grad_(has_gradient)
        found = function(*tensors, mask.clone(), *constants)
        if len(names) == 1 or not isinstance(found, (tuple, list)) or len(found) != len(names):
            found = [found] * len(names)
        grads = gradients(found[0], {[*inputs][0]: tensors[0]}) if has_gradient else {}
        return dict(zip(names, found)) | grads

    B, T = mask.shape
    columns = {"row": [b for b in range(B) for _ in range(T)], "t": [*range(1, T + 1)] * B,
               "mask": [int(m) for m in flat(mask)]}
    return Case(call, columns | {name: flat(x) for name, x in inputs.items()}, title)


def gradients(result, inputs: dict) -> dict:
    """The gradient of a result for each named input; None if there is none."""
    grads = [None] * len(inputs)
    if isinstance(result, Tensor) and result.requires_grad:
        grads = torch.autograd.grad(result.sum(), [*inputs.values()], allow_unused=True)
    return {f"gradient for {name}": grad for name, grad in zip(inputs, grads)}


def random_ids(rng: random.Random, *lengths) -> list[list[int]]:
    """Lists of random token ids of these lengths."""
    return [[rng.randrange(8, 640) for _ in range(length)] for length in lengths]


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
    """Quotes inside words, repeated, missing, and beside punctuation."""
    for response, quotes in [
            ("a cat", ["cat"]), ("a cat", ["dog"]), ("cats", ["cat"]), ("a cat", ["at"]),
            ("cats, cat", ["cat"]), ("cat cat", ["cat"]), ("cat cat", ["cat", "cat"]),
            ("cat", ["cat", "cat"]), ("cat cat", ["cat", "cat", "cat"]), ("Cat", ["cat"]),
            ("cat cat cat", ["cat", "cat"]), ("The cat, a dog", ["a dog", "The"]),
            ("a (cat) sat", ["(cat)"]), ('he said "no."', ['"no."']), ("so he sat.", ["sat."]),
            ("It ran, twice", [", twice"]), ("a 3rd cat", ["3"]), ("a.b axb", ["a.b"]),
            ("a cat, a cat", ["a cat", "cat", "a cat"]), ("the man (the cat)", ["the"]),
            ("a cat", [" cat"]), ("my_cat_2", ["cat"]), ("ha ha ha", ["ha ha"]),
            ("B2B", ["B"]), ("a cat", ["a cat", "a"])]:
        def call(function):
            spans = function(response, list(quotes))
            return {"result": None if spans is None else sorted(map(tuple, spans))}
        columns = {"character": [*map(repr, response)], "place": [*range(len(response))]}
        yield Case(call, columns, f"response: {response!r}\nquotes: {quotes}")


def cases_token_rewards():
    """All short texts with one span, then some with two: whitespace, halves, EOS, conflicts."""
    words = ["cat", " cat", "cat ", " ", ".\n"]
    short = [[word] for word in words]
    long = [[a, b] for a in words for b in words]
    rng = random.Random(0)
    for texts, count in ((short, 1), (short, 2), (long, 2), (long, 3)):     # count of spans
        for tokens in texts:
            for _ in range(4):
                yield reward_case(tokens, [
                    Span(*sorted(rng.sample(range(len("".join(tokens)) + 1), 2)),
                         rng.choice([-1, 1])) for _ in range(count)])


def reward_case(tokens: list[str], spans: list[Span]) -> Case:
    """A case of `token_rewards`: these tokens and an EOS."""
    text = "".join(tokens)
    ends = [len("".join(tokens[:t])) for t in range(len(tokens) + 1)]
    offsets = [*zip(ends, ends[1:]), (ends[-1], ends[-1])]
    columns = {"token": [*map(repr, tokens), "EOS"], "start": [start for start, _ in offsets],
               "end": [end for _, end in offsets]}
    title = "\n".join(f"span: {text[span.start : span.end]!r}, start {span.start}, "
                      f"end {span.end}, label {span.label:+d}" for span in spans)
    return Case(lambda function: {"δ": function(text, list(offsets), list(spans))}, columns,
                title)


def cases_z_loss():
    """One or two pairs of x and z, and the gradient of two LoRA matrices."""
    rng = random.Random(0)
    for lengths in ([(1, 1)], [(2, 1)], [(1, 2)], [(3, 2)], [(2, 3), (3, 1)], [(1, 5), (4, 2)]):
        pairs = [tuple(random_ids(rng, x, z)) for x, z in lengths]

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
        start = draw(rng, [2, 2, 2], -1, 1), draw(rng, [3], -1, 1)                 # W, bias
        words = [rng.randrange(3) for _ in delta]

        def logprobs_of(W, bias):
            return (features @ W.T + bias).log_softmax(-1)[range(T), words]        # [T]

        def call(function):
            parameters = [nn.Parameter(x.clone()) for x in start]
            for p in parameters:
                p.grad = torch.ones_like(p)
            return {"g_NL": function(logprobs_of(*parameters), torch.tensor(delta), parameters)}
        yield Case(call, {"t": [*range(1, T + 1)], "δ": delta,
                          "log π": logprobs_of(*start).tolist()},
                   "parameters: W [3, 2] and bias [1, 3]; p.grad is 1 before the call")


def cases_add_penalty():
    """Tokens where the policy is above and below the reference; the padding holds numbers."""
    rng = random.Random(0)
    for lengths in ([1], [1], [3], [2, 1], [4, 2, 3]):
        inputs = {"δ": draw(rng, lengths, -1, 1).round(),
                  "log π_old": draw(rng, lengths, -3, -0.1),
                  "log π_ref": draw(rng, lengths, -3, -0.1)}
        yield batch_case(["r"], inputs, lengths, [0.5], "β = 0.5")


def cases_gae():
    """One token, then more; the padding of shorter rows holds numbers."""
    rng = random.Random(0)
    for lengths in ([1], [2], [3], [2, 1], [3, 2], [4, 1, 3]):
        inputs = {"r": draw(rng, lengths, -1, 1), "V": draw(rng, lengths, -1, 1)}
        yield batch_case(["A", "R"], inputs, lengths, [0.9, 0.8], "γ = 0.9, λ = 0.8")


def cases_whiten():
    """One row, then rows of different lengths, whose padding holds numbers."""
    rng = random.Random(0)
    for lengths in ([2], [3], [2, 1], [4, 2, 3]):
        yield batch_case(["Â"], {"A": draw(rng, lengths, -1, 3)}, lengths, [])


def cases_ppo_loss():
    """One token with each kind of ρ and A, then more; the padding holds numbers."""
    rng = random.Random(0)
    tokens = [(0.0, 1.0), (0.5, 1.0), (0.5, -1.0), (-0.5, 1.0), (-0.5, -1.0)]   # log ρ, A
    inputs = [(torch.tensor([[change]]), torch.tensor([[A]]), [1]) for change, A in tokens]
    for lengths in ([3], [2, 1], [4, 1, 3], [5, 5, 2, 4]):
        inputs.append((draw(rng, lengths, -0.8, 0.8), draw(rng, lengths, -2, 2), lengths))
    for change, advantages, lengths in inputs:
        old = draw(rng, lengths, -2, -1)
        case = batch_case(["loss"], {"log π": old + change, "log π_old": old, "A": advantages},
                          lengths, [0.2], "ε = 0.2", has_gradient=True)
        case.tokens["ρ"] = flat(change.exp())
        yield case


def cases_update():
    """A step on one token, on a longer row and on more rows, and two steps in a row."""
    rng = random.Random(1)
    lengths = [1, 3, 7, 2, 6]
    prompts = random_ids(rng, 3, 6, 1, 4, 2)
    responses = random_ids(rng, *lengths)
    config = PolicyConfig(temperature=0.7, entropy_coef=0.3, value_coef=0.6, clip=0.2,
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
            model, head = deepcopy(start)
            theta = lora_parameters(model, "policy")
            groups = [{"params": theta}, {"params": [*head.parameters()]}]
            optimizer = torch.optim.SGD(groups, 0.1)
            norms = [function(batch, index, model, head, optimizer, config,
                              lambda *terms: 2 * ppo_loss(*terms)) for index in steps]
            return {"norm": norms, "ψ after the last step": [*head.parameters()],
                    "θ after the last step": theta}
        index = steps[-1]
        picked = batch.mask[index].bool()
        columns = {"row": [i for i in index for _ in range(lengths[i])]}
        columns |= {name: tensor[index][picked].tolist() for name, tensor in {
            "log π_old": batch.logprobs_old, "Â": batch.advantages, "V_old": batch.values,
            "R": batch.returns}.items()}
        yield Case(call, columns, f"rows of each step: {steps}")


def cases_lora_forward():
    """One vector, then a batch, and the gradients of x and the two matrices."""
    rng = random.Random(0)
    for shape, features, rank, outputs in (((1,), 1, 1, 1), ((1,), 2, 2, 1), ((2, 3), 5, 2, 4)):
        numbers = {"x": draw(rng, [features] * math.prod(shape), -2, 2).view(*shape, features),
                   "W": draw(rng, [features] * outputs, -2, 2),
                   "down": draw(rng, [features] * rank, -2, 2),
                   "up": draw(rng, [rank] * outputs, -2, 2)}

        def call(function):
            x, W, down, up = (tensor.clone().requires_grad_() for tensor in numbers.values())
            result = function(x, W.detach(), down, up, 5.0)
            return {"result": result} | gradients(result, {"x": x, "down": down, "up": up})
        columns = {"input": [*numbers], "shape": [str([*x.shape]) for x in numbers.values()],
                   "first number": [flat(x)[0] for x in numbers.values()]}
        yield Case(call, columns, f"α = 5, r = {rank}")


def cases_generate():
    """One short prompt, then more, all beginnings of posts. Some u are 0 or above all sums.
    Token ids below 8 never occur, so a sum can equal u = 0."""
    rng = random.Random(0)
    model, tokenizer = load_model(toy.BASE, device="cpu")
    model.lm_head.register_forward_hook(
        lambda module, inputs, logits: logits.index_fill(-1, torch.arange(8), -1e9))
    calls = []                                    # of the model: number of columns, …

    def record(module, arguments, options):
        positions = options["position_ids"]
        calls.append((positions.shape[1], positions[:, -1].tolist(),
                      options["attention_mask"][:, -1].tolist()))

    model.model.register_forward_pre_hook(record, with_kwargs=True)
    posts = [tokenizer(row["post"]).input_ids for row in toy.rows("train", 4)]
    for lengths, T in (([2], 1), ([2], 2), ([1], 4), ([2, 3], 2), ([2, 3], 4),
                       ([6, 3, 8, 8], 10)):
        prompts = [ids[:length] for ids, length in zip(posts, lengths)]
        uniforms = draw(rng, [T] * len(lengths), 0.1, 0.9)
        if T > 3:
            uniforms[-1, 1] = 0.0
            uniforms[0, -1] = 1.5                     # no sum is above it
        elif len(prompts) > 1:
            uniforms[0, 0] = 1.5                      # answer 0 is EOS, whatever was read
        longest = solutions.generate(model, prompts, uniforms, 0.7, -1)
        eos = longest[-1][2] if T > 3 else longest[0][0] if len(prompts) > 1 else -1

        def call(function):
            calls.clear()
            result = function(model, [list(x) for x in prompts], uniforms.clone(), 0.7, eos)
            widths, positions, attention = [*zip(*calls)] or [[0], [None], [None]]
            needed = max(lengths) + T - 1
            return {"result": result, "columns read twice": max(0, sum(widths) - needed),
                    "attention of the prompts' last column": attention[0],
                    "position of the prompts' last column": positions[0]}
        columns = {"row": [i for i in range(len(prompts)) for _ in range(T)],
                   "t": [*range(1, T + 1)] * len(prompts), "u": flat(uniforms)}
        yield Case(call, columns, f"prompts: {prompts}\nEOS: {eos}, τ = 0.7")
