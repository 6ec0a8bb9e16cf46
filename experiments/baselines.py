"""What Text2Grad is compared with (§4.3, Tables 2 and 3, Appendix N): LoRA on the same base.

    python -m experiments.baselines dpo                  # on the toy world; sft, ilf, sdpo, …
    python -m experiments.baselines sft --task slf5k --data rows.jsonl --model MODEL
    python -m experiments.baselines end                  # a reward design: see designs.py

    sft           imitate references: −E log π(y*|x)
    ilf           imitate refinements: a critique of y, y rewritten by it, SFT on that
    reflection    SFT; when asked, y ~ π, z' ~ R_φ(x, y), and the answer is y' ~ π'(x, y, z')
    dpo           −log σ(β(Δ_w − Δ_l)), Δ = log π(y|x) − log π_ref(y|x), on preference pairs
    ppo           Algorithm 4 with a scalar reward at the last token, −log σ(r_w − r_l)
    prm_ppo       Algorithm 4 with a reward for every step, −log σ(±ℓ) on labelled steps
    sdpo          self-distillation (arXiv 2601.20802): the policy that was shown its critique
                  teaches the policy that was not

The flags behind the name are those of text2grad.py. SFT needs the field `reference` in a row;
critiques, step labels and preferences, by the sums of two responses' labels, are phase 1's.

The paper gives no settings for these. Each takes Text2Grad's: the adapter's shape, as many
responses and as many optimizer steps. The toy's base cannot follow an instruction that it never
saw. So a function that reads the critique, and not the post, makes its refinements; and what
rewrites, in reflection and in SDPO, has learnt it from them. Other models are asked.

B pairs or rows, T tokens, N tokens of a flat batch, V words.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import text2grad
from annotate import Span, annotate, token_offsets
from data import (InputError, Task, append_row, chunks, get_task, parse_flags, read_rows,
                  run_script)
from experiments.designs import (ANNOTATORS, LEARNT, SCORED, TRUE, mark_ends, token_scores,
                                 true_critic)
from model import (encode_answer, encode_prompt, load_lora, load_model, lora_parameters,
                   response_hidden, save_lora, use_lora)
from reward_model import Judgement, RewardConfig, fit_adapter, write_critiques
from runtime import WORLD_SIZE, lock_directory, result_exists, save_settings
from sampling import head_weight, pad_batch, token_logprobs
from text2grad import (MAX_GRAD_NORM, Config, Rollouts, annotator, batch_rows, check, decay,
                       fitting, forward, load_rows, preset, respond, reward_model_critic,
                       reward_settings, sample_rollouts, start_policy, train)


# ── The losses

DPO_BETA = 0.1                          # how dear it is to leave the reference


def dpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, ref_chosen: Tensor,
             ref_rejected: Tensor, beta: float) -> Tensor:
    """−log σ(β [(log π(y_w) − log π_ref(y_w)) − (log π(y_l) − log π_ref(y_l))])

    Rafailov et al. 2023; Appendix N. Log-probs of whole responses in nats, [B] each → [B].
    """
    margin = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    return -F.logsigmoid(beta * margin)


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """−log σ(r(x, y_w) − r(x, y_l)): the preferred one scores higher (Appendix N). [B] → [B]"""
    return -F.logsigmoid(chosen - rejected)


def step_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """−log σ(label · ℓ) at the end of every step: a process reward model's (Appendix N).

    scores [B, T], labels [B, T] with +1 correct, −1 not, 0 elsewhere → [N], N labels.
    """
    return -F.logsigmoid((labels * scores)[labels != 0])


def sdpo_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Σ_t KL(π_θ(·|x, y_<t) ‖ π_θ(·|x, y, c, y_<t)), the teacher held fixed.

    Hübotter et al. 2026, arXiv 2601.20802. Logits [N, V] each → scalar, in nats.
    """
    p, q = student.log_softmax(-1), teacher.detach().log_softmax(-1)
    return (p.exp() * (p - q)).sum()


def sequence_logprobs(model, pairs: list[tuple]) -> Tensor:
    """log π(y|x) = Σ_t log π(y_t | x, y_<t), by the adapter in use. [(x, y)] as ids → [B]"""
    *inputs, mask = pad_batch(*zip(*pairs), model.device)
    at = mask.bool()
    hidden = response_hidden(model, *inputs, mask)[at]                                  # [N, H]
    found = token_logprobs(hidden, head_weight(model), inputs[2][at])
    return torch.stack([own.sum() for own in found.split(mask.sum(1).tolist())])


def both_sides(pairs: list[tuple]) -> list[tuple]:
    """[(x, y_w, y_l)] → all (x, y_w), then all (x, y_l)."""
    return [(x, w) for x, w, _ in pairs] + [(x, l) for x, _, l in pairs]


def preference_loss(model, pairs, reference: str | None) -> Tensor:
    """DPO of some (x, y_w, y_l), summed; π_ref as in text2grad.py."""
    both = both_sides(pairs)
    with torch.no_grad(), use_lora(model, reference):
        before = sequence_logprobs(model, both).chunk(2)
    return dpo_loss(*sequence_logprobs(model, both).chunk(2), *before, DPO_BETA).sum()


def pair_losses(model, tokenizer, pairs: list[tuple]) -> Tensor:
    """Bradley–Terry of some (x, y_w, y_l) as ids → [B]; over log 2 the order is wrong."""
    scores, mask = token_scores(model, tokenizer, both_sides(pairs))
    last = mask.sum(1, keepdim=True) - 1
    return bradley_terry_loss(*scores.gather(1, last).squeeze(1).chunk(2))


def labelled_losses(model, tokenizer, rows: list[tuple]) -> Tensor:
    """`step_loss` of some (x, y, labels), a label for each id of y → [N]; likewise."""
    scores, mask = token_scores(model, tokenizer, [(x, y) for x, y, _ in rows])
    labels = [row + [0] * (mask.shape[1] - len(row)) for _, _, row in rows]
    return step_loss(scores, torch.tensor(labels, device=model.device))


# ── Rows: refinements, preference pairs, step labels

def budget(rows: list[dict], config: Config, each: int = 1) -> list[dict]:
    """Rows for as many responses as Algorithm 4 samples, so many to each."""
    return rows[: max(1, config.iterations * config.batch_size // each)]


def annotated(model, tokenizer, rows: list[dict], config: Config, out: Path) -> list[dict]:
    """Phase 1 of text2grad.py: responses and critiques, the rows of feedback.jsonl."""
    respond(model, tokenizer, rows, config, out)
    if not result_exists(out / "feedback.jsonl"):
        annotate(annotator(config, out))
    return read_rows(out / "feedback.jsonl")


def encode(tokenizer, texts) -> list[tuple]:
    """(prompt, answer, …) → (x, y, …) as ids, EOS included."""
    return [(encode_prompt(tokenizer, x), *(encode_answer(tokenizer, y) for y in answers))
            for x, *answers in texts]


def preferences(model, tokenizer, rows: list[dict], config: Config, out: Path) -> list[tuple]:
    """(x, y_w, y_l) of two responses to a row, the better first by the sum of labels."""
    twice, answers = [row for row in rows for _ in range(2)], defaultdict(list)
    for row in annotated(model, tokenizer, twice, config, out):
        merit = sum(span["label"] for span in row["spans"])
        answers[row["prompt"]].append((merit, row["response"]))
    sides = [(x, *max(said), *min(said)) for x, said in answers.items()]
    return [(x, better, worse) for x, most, better, least, worse in sides if most > least]


def labelled_steps(row: dict, tokenizer) -> tuple[list[int], list[int], list[int]]:  # Table 17
    """(x, y, labels) of a row annotated in steps: ±1 at the last token of each, 0 elsewhere."""
    ((x, y),) = encode(tokenizer, [(row["prompt"], row["response"])])
    steps = [Span(**span) for span in row["spans"]]
    return x, y, mark_ends(*token_offsets(tokenizer, y), steps)


def rewrite_prompt(prompt: str, response: str, critique: str) -> str:
    """The instruction to rewrite a response by what its critique says, span JSON aside."""
    said = critique.rpartition("\n{")[0].strip() or critique.strip()
    return (f"{prompt}\n\nResponse: {response}\n\nCritique: {said}\n\n"
            f"Write the response anew, mended as the critique asks.")


def mend(response: str, critique: str) -> str:
    """A toy summary without what its critique calls wrong, twice said or the writer's own."""
    for clause in re.findall(r"It says ([^.]+) twice\.", critique):
        response = response.replace(f", {clause}", "", 1)
    for words in re.findall(r"It speaks of ([^.]+) as the writer\.", critique):
        response = response.replace(words, f"the{words[2:]}")
    for said, fact in re.findall(r"The \w+ ([^.,]+) was ([^.,]+), wrong\.", critique):
        response = re.sub(rf"\b{re.escape(said)}(?!\w)", fact, response)
    return response


REWRITING = Task("rewriting", str)                         # its rows are the prompts themselves


def rewrite(model, tokenizer, asked: list[str], config: Config, adapter, generator):
    """Texts y' ~ π'(· | x, y, c), by instructions of `rewrite_prompt`."""
    own = replace(config, task="experiments.baselines:REWRITING")
    return sample_rollouts(model, tokenizer, asked, own, adapter, generator).texts


def refinements(model, tokenizer, rows, config: Config, out: Path, told=False) -> list[tuple]:
    """Phase 1's y and z → (x, y⁺), less the empty ones; y⁺ of `mend` in the toy world, else of
    π_ref. told: the instruction to rewrite y in the place of x."""
    rows = annotated(model, tokenizer, budget(rows, config), config, out)
    x, y, c = ([row[key] for row in rows] for key in ("prompt", "response", "critique"))
    asked = [*map(rewrite_prompt, x, y, c)]
    if config.task == "toy":
        texts = map(mend, y, c)
    else:
        generator = torch.Generator().manual_seed(config.seed)
        texts = rewrite(model, tokenizer, asked, config, config.reference, generator)
    return [(x, y) for x, y in zip(asked if told else x, texts) if y.strip()]


# ── The methods: each leaves the adapter "policy", which is there before

def fit_policy(model, tokenizer, texts: list[tuple], config: Config, out: Path, name="policy",
               **loss):
    """Fit an adapter to (x, y), −E log π(y|x), in as many passes as Algorithm 4 makes steps."""
    if not texts:
        raise InputError("no row is left to learn from: samples are empty, or tied")
    shared = "seed", "lora_r", "lora_alpha", "lora_targets", "learning_rate", "micro_batch_size"
    seen = config.iterations * config.batch_size * config.ppo_epochs
    settings = RewardConfig(**{key: getattr(config, key) for key in shared},
                            batch_size=config.minibatch_size,
                            epochs=max(1, round(seen / len(texts))))
    fit_adapter(model, encode(tokenizer, texts), name, settings,
                out=out / f"fit-{name}", **loss)


def sft(model, tokenizer, rows, config: Config, out: Path):
    """−E log π(y*|x), y* the row's reference."""
    rows, prompt = budget(rows, config), get_task(config.task).policy_prompt
    if any("reference" not in row for row in rows):
        raise InputError("SFT imitates the field 'reference', which a row lacks")
    texts = [(prompt(row), row["reference"]) for row in rows]
    fit_policy(model, tokenizer, texts, config, out)


def ilf(model, tokenizer, rows, config: Config, out: Path):
    """Imitation learning from language feedback (Scheurer et al. 2023): −E log π(y⁺|x)."""
    texts = refinements(model, tokenizer, rows, config, out)
    fit_policy(model, tokenizer, texts, config, out)


def learn_to_rewrite(model, tokenizer, rows, config: Config, out: Path, name: str):
    """The toy's: an adapter learns −E log π'(y⁺ | x, y, c); an instructed model can rewrite."""
    if config.task == "toy":
        texts = refinements(model, tokenizer, rows, config, out, told=True)
        fit_policy(model, tokenizer, texts, config, out, name)
        save_lora(model, name, out / name)


def reflection(model, tokenizer, rows, config: Config, out: Path):
    """SFT, and the toy's "rewriter" of `reflect`."""
    sft(model, tokenizer, rows, config, out)
    learn_to_rewrite(model, tokenizer, rows, config, out, "rewriter")


def dpo(model, tokenizer, rows, config: Config, out: Path):
    """Direct preference optimisation (Appendix N), of two responses to a row."""
    texts = preferences(model, tokenizer, budget(rows, config, 2), config, out)
    loss_of = partial(preference_loss, reference=config.reference)
    fit_policy(model, tokenizer, texts, config, out, loss_of=loss_of, count_of=lambda _: 1)


def fit_scores(model, tokenizer, rows, config: Config, out: Path, kind: str) -> float:
    """A "scalar" or a "steps" reward model, the adapter "reward" → its share right, held out.

    A third of R_φ's rate and one pass more: a bit for a pair teaches less than a critique.
    """
    rows, settings = rows[: config.annotated_rows], reward_settings(config, out)
    if kind == "steps":
        losses, count_of = labelled_losses, lambda row: sum(map(abs, row[2]))
        critic, mode = ANNOTATORS["steps"]
        own = replace(config, mode=mode, annotator_function=critic if config.task == "toy" else
                      config.annotator_function)
        rows = annotated(model, tokenizer, rows, own, out)
        found = [labelled_steps(row, tokenizer) for row in rows if row["spans"]]
    else:
        losses, count_of = pair_losses, lambda _: 1
        found = encode(tokenizer, preferences(model, tokenizer, rows, config, out))
    settings = replace(settings, learning_rate=settings.learning_rate / 3,
                       epochs=settings.epochs + 1)
    some = max(1, len(found) // 10)
    fit_adapter(model, found[some:], "reward", settings,
                lambda model, part: losses(model, tokenizer, part).sum(), count_of)
    save_lora(model, "reward", out / "reward" / "adapter")
    with torch.no_grad(), use_lora(model, "reward"):
        parts = [losses(model, tokenizer, part) for part in chunks(found[:some], 64)]
    return (torch.cat(parts) < math.log(2)).float().mean().item()


def ppo(model, tokenizer, rows, config: Config, out: Path, kind="scalar"):
    """PPO of Tables 2 and 3: Algorithm 4 with r(x, y) at the last token. "steps": PRM-PPO
    (Appendix N), with a score at the end of every step. --reward_model: what it fitted before.
    """
    if not lora_parameters(model, "reward"):
        fit_scores(model, tokenizer, rows, config, out, kind)
    train(model, tokenizer, rows, config, out, SCORED[kind])


def sdpo(model, tokenizer, rows, config: Config, out: Path):
    """Self-distillation from feedback (Hübotter et al. 2026), on the policy's own rollouts.

    The critique is R_φ's if there is one, else --annotator_function's. A minibatch is one
    forward pass. The toy's policy first learns to rewrite.
    """
    learn_to_rewrite(model, tokenizer, rows, config, out, "policy")
    critic = reward_model_critic if lora_parameters(model, "reward") else true_critic
    parameters, truths = lora_parameters(model, "policy"), get_task(config.task).truth
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    for iteration in tqdm(range(config.iterations), "sdpo"):
        seed = config.seed * 1_000_003 + iteration
        generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        drawn = batch_rows(rows, config, iteration)
        batch = sample_rollouts(model, tokenizer, drawn, config, "policy", generator)
        shown = show(batch, critic(batch, model, tokenizer, config), tokenizer)
        optimizer.param_groups[0]["lr"] = config.learning_rate * decay(config, iteration)
        for _ in range(config.ppo_epochs):
            order = rng.sample(range(len(drawn)), len(drawn))
            for minibatch in chunks(order, config.minibatch_size):
                distil(model, batch.part(minibatch), shown.part(minibatch),
                       config.temperature)
                torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()
        means = {name: sum(map(truth, drawn, batch.texts)) / len(drawn)
                 for name, truth in truths.items()}
        append_row(out / "metrics.jsonl", {"iteration": iteration + 1, **means})


def show(batch: Rollouts, judged: list[Judgement], tokenizer) -> Rollouts:
    """The same responses to prompts that hold them and their critiques, as the teacher sees."""
    asked = map(rewrite_prompt, batch.prompts, batch.texts, (one.critique for one in judged))
    ids = [encode_prompt(tokenizer, prompt) for prompt in asked]
    x, mask, *_ = pad_batch(ids, [], batch.mask.device)
    return replace(batch, prompt_ids=x, prompt_mask=mask)


def distil(model, seen: dict[str, Tensor], shown: dict[str, Tensor], temperature: float):
    """The gradient of `sdpo_loss` per token, by one set of weights, of parts of `Rollouts`."""
    with torch.no_grad():
        teacher, _ = forward(model, shown, "policy")                                   # [N, H]
    student, _ = forward(model, seen, "policy")
    logits = (x @ head_weight(model).T / temperature for x in (student, teacher))
    (sdpo_loss(*logits) / len(student)).backward()


METHODS = {"sft": sft, "ilf": ilf, "reflection": reflection, "dpo": dpo, "ppo": ppo,
           "prm_ppo": partial(ppo, kind="steps"), "sdpo": sdpo}


# ── What was learnt

def reflect(rollouts: Rollouts, model, tokenizer, config: Config, generator) -> list[str]:
    """z' of R_φ and y' ~ π'(· | x, y, z') for rollouts of y: the texts of y'."""
    critiques = write_critiques(model, tokenizer, rollouts.prompts, rollouts.texts,
                                config.max_critique_tokens)
    asked = [*map(rewrite_prompt, rollouts.prompts, rollouts.texts, critiques)]
    return rewrite(model, tokenizer, asked, config, "rewriter", generator)


def main(argv=None):
    """One design or baseline, from rows to the adapter that eval.py judges."""
    name, *flags = argv or sys.argv[1:] or [""]
    designs = LEARNT | TRUE
    if name not in designs and name not in METHODS:
        raise InputError(f"{name or 'no method'}: name one of {', '.join([*METHODS, *designs])}"
                         f", then flags of text2grad.py")
    flags = ["--output_dir", f"runs/{name}", "--probe_rows", "0", *flags]   # or as they say
    config = parse_flags(Config, flags, __doc__, preset)
    if name in TRUE and not config.annotator_function:
        raise InputError(f"{name} needs --annotator_function")
    if name in designs:
        return text2grad.main(flags, designs[name], name in LEARNT)
    if WORLD_SIZE > 1:
        raise InputError("a baseline runs in one process")
    out = Path(config.output_dir)
    check(config, out, name != "sft")
    _lock = lock_directory(out)                                # held until the process ends
    model, tokenizer = load_model(config.model, config.dtype)
    rows = fitting(load_rows(config)[0], model, tokenizer, config)
    save_settings(config, out)
    start_policy(model, config)
    if config.reward_model:
        load_lora(model, "reward", config.reward_model)
    METHODS[name](model, tokenizer, rows, config, out)
    save_lora(model, "policy", out / "policy")
    print(f"next: python eval.py --task {config.task} --model {config.model} --adapter "
          f"{out}/policy")


if __name__ == "__main__":
    run_script(main, "baselines", torch.OutOfMemoryError)
