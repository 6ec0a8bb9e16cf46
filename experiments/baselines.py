"""What Text2Grad is compared with (§4.3, Tables 2 and 3, Appendix N): LoRA on the same base.

    python -m experiments.baselines --method dpo               # on the toy world; sft, ilf, …
    python -m experiments.baselines --method prm_ppo --task kodcode --data rows.jsonl \\
                                    --model MODEL --allow_code_execution

    sft           imitate references: −E log π(y*|x)
    ilf           imitate refinements: a critique of y, y rewritten by it, kept where no fault
                  is left, then SFT on it
    reflection    SFT; when asked, y ~ π, z' ~ R_φ(x, y), and the answer is y' ~ π'(x, y, z')
    dpo           −log σ(β(Δ_w − Δ_l)), Δ = log π(y|x) − log π_ref(y|x), on preference pairs
    ppo           text2grad.py with a scalar reward at the last token, −log σ(r_w − r_l) on
                  the same pairs
    prm_ppo       text2grad.py with a reward for every step, −log σ(±ℓ) on labelled steps

Where things come from. References: `reference`, `ideal_human_summary`, `solution` or the
chosen answer. Preference pairs: the row's own (chosen and rejected; SLF5K's comparison;
KodCode's trials that passed and failed); else two samples of the reference policy, ranked by
--critic or, with --allow_code_execution, by the row's tests, ties left out; else the row's
reference against a sample. Critiques and step labels: annotate.py, as in phase 1.

The paper gives no settings for these. Each takes Text2Grad's: the same adapter shape, batch
and rows. What is done in --output_dir is reused. In the toy world `toy.refine`, a function that
sees critique and response and not the post, makes the refinements, because the base cannot
follow an instruction that it never saw; an adapter "rewriter" learns to do the same for
reflection. With --refiner none the model is asked to rewrite, as in the papers.

B pairs, T tokens.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from annotate import annotate, token_offsets
from data import (InputError, chunks, flag, get_task, load_object, parse_flags, read_rows,
                  run_script, write_rows)
from experiments.designs import (own_uniforms, scalar, sequence_scores, share, silent,
                                 step_ends, steps, token_scores, true_critic, true_judgement)
from measures.sandbox import SandboxError, code_of, run_python
from model import (RANK, add_lora, checkpoint_activations, encode_answer, encode_prompt,
                   eos_ids, everyone, load_lora, load_model, lock_directory, lora_parameters,
                   response_hidden, save_lora, say, shard, start_ranks, together, use_lora)
from report import run_report, table
from reward_model import RewardConfig, fit_adapter, reward_preset, split_rows, write_critiques
from sampling import context_length, generate, head_weight, pad_batch, token_logprobs
from text2grad import (FREE, Config, Rollouts, annotator, check, critique, evaluate, fit_reward,
                       fitting, once, optimise, phase, preset, respond, settings)
from text2grad import split_rows as split_prompts

METHODS = ("sft", "ilf", "reflection", "dpo", "ppo", "prm_ppo")


@dataclass
class BaselineConfig(Config):
    """The flags of text2grad.py, and these. minibatch_size: rows of the policy per step."""
    output_dir: str = flag("runs/baseline", "run directory: config, metrics, samples, adapters")
    learning_rate: float | None = flag(None, "peak of the policy's; none: the method's own",
                                       least=0)
    method: str = flag("sft", "which baseline", METHODS)
    epochs: int = flag(3, "passes over the rows where the policy is fitted to rows", least=1)
    dpo_beta: float = flag(0.1, "β of DPO: how dear it is to leave the reference", least=0)
    score_learning_rate: float = flag(1e-3, "peak of the scalar or step reward model's; 3e-3, "
                                      "R_φ's, learns nothing here", least=0)
    score_epochs: int = flag(4, "passes over its rows: a bit per pair teaches less than a "
                             "critique", least=1)
    refiner: str = flag("toy:refine", "a function module:function of (response, critique); "
                        "none: the model itself")

    GROUPS = Config.GROUPS | {"method": "the baseline"}


# Of the toy world: what worked at first. Of the others: TRL's defaults.
RATES = {"toy": {"dpo": 1e-3, "ppo": 7e-4, "prm_ppo": 7e-4, "other": 3e-3},
         "other": {"dpo": 1e-6, "ppo": 1e-6, "prm_ppo": 1e-6, "other": 2e-5}}


def own_preset(task: str) -> dict:
    """Text2Grad's, less a rate, which the method has; a function refines in toy alone."""
    own = {"output_dir": "runs/baseline", "learning_rate": None}
    real = {"refiner": "none", "score_learning_rate": 1e-5, "score_epochs": 3}
    return preset(task) | own | ({} if task == "toy" else real)


def complete(config: BaselineConfig) -> BaselineConfig:
    """Fill in what follows from the method: learning rate, and how the annotator works."""
    rates = RATES.get(config.task, RATES["other"])
    rate = config.learning_rate or rates.get(config.method, rates["other"])
    config = replace(config, learning_rate=rate)
    if config.method == "prm_ppo":
        own = config.critic == "toy:critique"
        config = replace(config, mode="experiments.modes:STEPS",
                         critic="experiments.designs:critique_steps" if own else config.critic)
    return config


def critic_of(config: BaselineConfig):
    """Who judges: what PPO maximises, and for the others whoever can fill the table."""
    if config.method in ("ppo", "prm_ppo"):
        return scalar if config.method == "ppo" else steps
    if config.method == "reflection":
        return reflected
    if config.reward_model:
        return critique
    return true_critic if config.critic else silent


# ── The losses

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
    """−Σ log σ(label · ℓ) over the ends of steps: a process reward model's (Appendix N).

    scores [B, T], labels [B, T] with +1 correct, −1 not, 0 elsewhere → scalar.
    """
    return -(F.logsigmoid(labels * scores) * (labels != 0)).sum()


def sequence_logprobs(model, pairs: list[tuple], pad: int) -> Tensor:
    """log π(y|x) = Σ_t log π(y_t | x, y_<t), by the adapter in use. [(x, y)] as ids → [B]"""
    *inputs, mask = pad_batch([x for x, _ in pairs], [y for _, y in pairs], pad, model.device)
    at = mask.bool()
    hidden = response_hidden(model, *inputs, mask)[at]                                  # [N, H]
    found = token_logprobs(hidden, head_weight(model), inputs[2][at])
    return torch.zeros(mask.shape, device=model.device).masked_scatter(at, found).sum(1)


def both_sides(pairs: list[tuple]) -> list[tuple]:
    """[(x, y_w, y_l)] → all (x, y_w), then all (x, y_l)."""
    return [(x, w) for x, w, _ in pairs] + [(x, l) for x, _, l in pairs]


def preference_loss(config: BaselineConfig):
    """DPO of some (x, y_w, y_l), summed, for `fit_adapter`; π_ref as in text2grad.py."""
    def loss_of(model, pairs, pad):
        both = both_sides(pairs)
        with torch.no_grad(), use_lora(model, config.reference):
            reference = sequence_logprobs(model, both, pad).chunk(2)
        policy = sequence_logprobs(model, both, pad).chunk(2)
        return dpo_loss(*policy, *reference, config.dpo_beta).sum()
    return loss_of


def ranking_loss(tokenizer):
    """Bradley–Terry of some (x, y_w, y_l), summed, for `fit_adapter`."""
    def loss_of(model, pairs, _):
        scores = sequence_scores(model, tokenizer, both_sides(pairs))
        return bradley_terry_loss(*scores.chunk(2)).sum()
    return loss_of


def labelled_loss(tokenizer):
    """Cross-entropy of some (x, y, labels), summed; labels has one entry for each id of y."""
    def loss_of(model, rows, _):
        scores, mask = token_scores(model, tokenizer, [(x, y) for x, y, _ in rows])
        labels = [row + [0] * (mask.shape[1] - len(row)) for _, _, row in rows]
        return step_loss(scores, torch.tensor(labels, device=model.device))
    return loss_of


# ── Rows: references, refinements, preference pairs, step labels

def reference(row: dict) -> str | None:
    """The answer that a row brings as a good one, if it does."""
    names = ("reference", "ideal_human_summary", "tldr_human_reference_summary", "solution")
    chosen = row.get("chosen")
    found = [row.get(name) for name in names]
    found += [chosen[-1]["content"] if isinstance(chosen, list) and chosen else chosen]
    return next((text for text in found if isinstance(text, str) and text.strip()), None)


def own_pairs(row: dict) -> list[tuple[str, str]]:
    """(chosen, rejected) as the data set has them: UltraFeedback's, SLF5K's, KodCode's."""
    if row.get("chosen") and row.get("rejected"):
        pair = row["chosen"], row["rejected"]
        return [tuple(said if isinstance(said, str) else said[-1]["content"] for said in pair)]
    if preferred := str(row.get("comparison_preference") or ""):
        a, b = (row[f"generated_summary_for_comparison_{side}"] for side in "AB")
        return [(a, b) if preferred.strip().upper().endswith("A") else (b, a)]
    results = {"pass": [], "fail": []}
    for trial in (row.get("trials") or {}).values():
        results.setdefault(str(trial["test_result"]).lower()[:4], []).append(
            trial["solution_code"])
    return list(zip(results["pass"], results["fail"]))


def merit(row: dict, response: str, config: BaselineConfig) -> float | None:
    """What ranks two samples: Σδ over words, or whether tests pass; None: nobody can tell."""
    task = get_task(config.task)
    if task.tests and config.allow_code_execution:
        return float(run_python(code_of(response), task.tests(row)).passed)
    if not config.critic:
        return None
    words = [word.span() for word in re.finditer(r"\w+|[^\w\s]", response)]
    found = true_judgement(row, response, words, config)
    return None if found.reason else sum(found.delta)


def preferences(model, tokenizer, rows: list[dict], config: BaselineConfig) -> list[dict]:
    """Rows {id, prompt, chosen, rejected}: the row's own, or from samples of π_ref."""
    task, out, mute = get_task(config.task), [], []
    for n, row in enumerate(rows):
        head = {"id": str(row.get("id", n)), "prompt": task.policy_prompt(row)}
        pairs = own_pairs(row)
        out += [head | {"chosen": w, "rejected": l}
                for w, l in pairs if w.strip() and l.strip() and w != l]
        if not pairs:
            mute.append((head, row))
    generator = torch.Generator().manual_seed(config.seed)
    for part in tqdm(chunks(mute, 256), desc="sample pairs", disable=not mute):
        prompts = [head["prompt"] for head, _ in part for _ in range(2)]
        uniforms = torch.rand(len(prompts), config.max_new_tokens, generator=generator)
        ids = sample(model, tokenizer, prompts, config, config.reference, uniforms)
        texts = [token_offsets(tokenizer, y)[0] for y in ids]
        for (head, row), pair in zip(part, chunks(texts, 2)):
            said = [text for text in pair if text.strip()]
            out += [head | found for found in rank_samples(row, said, config)]
    if not out:
        raise InputError(f"{config.data}: no row gives a preference pair: samples are empty or "
                         f"tied, and none has a reference")
    return out


def rank_samples(row: dict, texts: list[str], config: BaselineConfig) -> list[dict]:
    """[{chosen, rejected}] of a row's samples, or [] where they are tied."""
    merits = [merit(row, text, config) for text in texts]
    if len(texts) == 2 and None not in merits:
        if merits[0] == merits[1]:
            return []
        worse, better = sorted(range(2), key=merits.__getitem__)
        return [{"chosen": texts[better], "rejected": texts[worse]}]
    better = reference(row)
    known = better and texts and texts[0] != better
    return [{"chosen": better, "rejected": texts[0]}] if known else []


def sample(model, tokenizer, prompts: list[str], config, adapter, uniforms) -> list[list[int]]:
    """y ~ π(·|x) for every prompt, by this rank alone: ids. uniforms: [B, max_new_tokens]"""
    asked, ids = [encode_prompt(tokenizer, prompt) for prompt in prompts], []
    ends, pad = eos_ids(tokenizer, model), tokenizer.pad_token_id
    with use_lora(model, adapter):
        for part in chunks(range(len(asked)), config.rollout_batch_size):
            x, u = [asked[i] for i in part], uniforms[list(part)]
            ids += generate(model, x, config.max_new_tokens, config.temperature, ends, pad,
                            uniforms=u)
    return ids


def refine_prompt(prompt: str, response: str, critique: str) -> str:
    """The instruction to rewrite a response by its critique (ILF, reflection)."""
    return (f"{prompt}\n\nResponse: {response}\n\nCritique: {critique}\n\n"
            f"Write the response anew, mended as the critique asks.")


def spoken(critique: str) -> str:
    """What a critique of R_φ says, without its span JSON."""
    return critique.rpartition("\n{")[0].strip() or critique.strip()


def refinements(model, tokenizer, rows: list[dict], config: BaselineConfig) -> list[dict]:
    """Rows with "refinement", and "kept": whether no quoted fault is left in it."""
    if config.refiner != "none":
        mend = load_object("--refiner", config.refiner)
        texts = [mend(row["response"], row["critique"]) for row in rows]
    else:
        prompts = [refine_prompt(row["prompt"], row["response"], row["critique"])
                   for row in rows]
        generator = torch.Generator().manual_seed(config.seed)
        uniforms = torch.rand(len(rows), config.max_new_tokens, generator=generator)
        ids = sample(model, tokenizer, prompts, config, config.reference, uniforms)
        texts = [token_offsets(tokenizer, y)[0].strip() for y in ids]
    found = []
    for row, text in zip(rows, texts):
        kept = bool(text.strip()) and not any(quote in text for quote in row["poor_spans"])
        names = ("id", "prompt", "response", "critique", "poor_spans")
        found.append({name: row[name] for name in names} | {"refinement": text, "kept": kept})
    return found


def labelled_steps(row: dict, tokenizer) -> tuple[list[int], list[int], list[int]]:  # Table 17
    """(x, y, labels) of a row annotated in steps: ±1 at the last token of each, 0 elsewhere."""
    y = encode_answer(tokenizer, row["response"])
    text, offsets = token_offsets(tokenizer, y)
    ends = step_ends(text, offsets, [(span["start"], span["end"]) for span in row["spans"]])
    labels = [0] * len(y)
    for end, span in zip(ends, row["spans"]):
        if end is not None:
            labels[end] = span["label"]
    return encode_prompt(tokenizer, row["prompt"]), y, labels


def fitting_ids(pairs: list[tuple], model, what: str) -> list[tuple]:
    """The tuples of ids whose first fits the context with each other; the rest is counted."""
    limit = context_length(model) - 1
    kept = [pair for pair in pairs if max(len(pair[0]) + len(y) for y in pair[1:]) <= limit]
    if not kept:
        raise InputError(f"none of {len(pairs)} {what} fits the model's context of {limit + 1} "
                         f"tokens")
    if len(kept) < len(pairs):
        say(f"left out {len(pairs) - len(kept)} of {len(pairs)} {what}, longer than the "
            f"model's context")
    return kept


# ── Fits

def policy_settings(config: BaselineConfig) -> RewardConfig:
    """The settings of `fit_adapter` for an adapter of the policy's shape."""
    shared = ("seed", "lora_r", "lora_alpha", "lora_targets", "learning_rate", "epochs",
              "micro_batch_size")
    return RewardConfig(**{name: getattr(config, name) for name in shared},
                        batch_size=config.minibatch_size)


def reward_settings(config: BaselineConfig) -> RewardConfig:
    """The settings of a reward model, as text2grad.py's phase 2 has them."""
    own = {"seed": config.seed, "micro_batch_size": config.micro_batch_size}
    return RewardConfig(**reward_preset(config.task) | own)


def start_policy(model, config: BaselineConfig):
    """The adapter "policy" before the first step, as text2grad.py has it."""
    if config.adapter:
        load_lora(model, "policy", config.adapter)
    else:
        torch.manual_seed(config.seed)
        add_lora(model, "policy", config.lora_r, config.lora_alpha, 0.0,
                 config.lora_targets.split(","))


def fit_and_keep(model, tokenizer, pairs, name: str, settings, directory: Path, **loss) -> str:
    """Fit an adapter, write it and the loss of every step; returns a summary."""
    losses = fit_adapter(model, tokenizer, pairs, name, settings, **loss)
    if RANK == 0:
        write_rows(directory.parent / f"{directory.name}-losses.jsonl",
                   [{"step": i, "loss": x} for i, x in enumerate(losses, 1)])
        save_lora(model, name, directory)
    tenth = max(1, len(losses) // 10)
    first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
    return f"{len(pairs)} rows, {len(losses)} steps, loss {first:.3f} → {last:.3f}"


def encode_answers(rows: list[tuple[str, str]], tokenizer) -> list[tuple]:
    """(prompt, answer) → (x, y) as ids, EOS included."""
    return [(encode_prompt(tokenizer, x), encode_answer(tokenizer, y)) for x, y in rows]


def encode_preferences(rows: list[dict], tokenizer) -> list[tuple]:
    """(x, y_w, y_l) as ids, EOS included."""
    return [(encode_prompt(tokenizer, row["prompt"]), encode_answer(tokenizer, row["chosen"]),
             encode_answer(tokenizer, row["rejected"])) for row in rows]


def imitate(model, tokenizer, rows: list[tuple[str, str]], config, out: Path) -> str:
    """−E log π(y*|x) over (prompt, answer), per token, EOS trained: SFT, and last in ILF."""
    start_policy(model, config)
    pairs = fitting_ids(encode_answers(rows, tokenizer), model, "rows")
    return fit_and_keep(model, tokenizer, pairs, "policy", policy_settings(config),
                        out / "policy")


def references(rows: list[dict], config: BaselineConfig) -> list[tuple[str, str]]:
    """(prompt, reference) of the rows, which must have one."""
    task = get_task(config.task)
    pairs = [(task.policy_prompt(row), reference(row)) for row in rows]
    for row, (_, answer) in zip(rows, pairs):
        if answer is None:
            raise InputError(f"row {row.get('id')}: SFT needs a reference; there is no "
                             f"reference, ideal_human_summary, solution or chosen in it")
    return pairs


def fit_preferences(model, tokenizer, config: BaselineConfig, out: Path) -> str:
    """DPO on preferences.jsonl."""
    start_policy(model, config)
    pairs = encode_preferences(read_rows(out / "preferences.jsonl"), tokenizer)
    return fit_and_keep(model, tokenizer, fitting_ids(pairs, model, "pairs"), "policy",
                        policy_settings(config), out / "policy",
                        loss_of=preference_loss(config), count_of=lambda _: 1)


def fit_scores(model, tokenizer, config: BaselineConfig, out: Path) -> str:
    """The scalar or the step reward model, an adapter "reward", judged on unseen prompts."""
    settings = replace(reward_settings(config), learning_rate=config.score_learning_rate,
                       epochs=config.score_epochs)
    if config.method == "prm_ppo":
        what, right_of = "steps", right_steps
        rows = [row for row in read_rows(out / "feedback.jsonl") if row["spans"]]
        loss = {"loss_of": labelled_loss(tokenizer),
                "count_of": lambda row: len(row[2]) - row[2].count(0)}
    else:
        what, right_of = "pairs", right_pairs
        rows = read_rows(out / "preferences.jsonl")
        loss = {"loss_of": ranking_loss(tokenizer), "count_of": lambda _: 1}

    def encode(rows):
        found = [labelled_steps(row, tokenizer) for row in rows] if what == "steps" else \
            encode_preferences(rows, tokenizer)
        return fitting_ids(found, model, "rows")

    training, held_out = split_rows(rows, config.eval_rows, config.seed)
    said = fit_and_keep(model, tokenizer, encode(training), "reward", settings,
                        out / "reward" / "adapter", **loss)
    metrics = {"held_out_rows": len(held_out), "held_out_accuracy": None}
    if held_out:
        found = []
        with torch.no_grad(), use_lora(model, "reward"):
            for part in chunks(encode(held_out), settings.micro_batch_size):
                found += right_of(model, tokenizer, part)
        metrics["held_out_accuracy"] = right = sum(found) / max(1, len(found))
        said += f"; held out: {right:.1%} of {what} right"
    if RANK == 0:
        write_rows(out / "reward" / "metrics.json", [metrics])
    return said


def right_pairs(model, tokenizer, pairs: list[tuple]) -> list[bool]:
    """Whether the preferred response of each pair scores higher."""
    chosen, rejected = sequence_scores(model, tokenizer, both_sides(pairs)).chunk(2)
    return (chosen > rejected).tolist()


def right_steps(model, tokenizer, rows: list[tuple]) -> list[bool]:
    """Whether the score of each labelled step has the sign of its label."""
    scores, _ = token_scores(model, tokenizer, [(x, y) for x, y, _ in rows])
    return [(score > 0) == (label > 0) for line, (_, _, labels) in zip(scores.tolist(), rows)
            for score, label in zip(line, labels) if label]


# ── Methods: rows → the adapter "policy"

def annotate_rows(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """Phase 1 of text2grad.py: responses and critiques."""
    respond(model, tokenizer, rows[: config.annotated_rows], config, out)
    phase("annotate", "feedback.jsonl", out, lambda: once(annotate, annotator(config, out)))


def load_absent(model, name: str, directory):
    """An adapter that was fitted in an earlier run."""
    if not lora_parameters(model, name):
        load_lora(model, name, directory)


def sft(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """SFT: −E log π(y*|x), y* the row's reference."""
    def work():
        pairs = references(rows[: config.annotated_rows], config)
        return imitate(model, tokenizer, pairs, config, out)
    phase("sft", "policy", out, work)


def refine(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """feedback.jsonl → refinements.jsonl."""
    def work():
        found = refinements(model, tokenizer, read_rows(out / "feedback.jsonl"), config)
        kept = sum(row["kept"] for row in found)
        if not kept:
            raise InputError(f"{out / 'feedback.jsonl'}: none of {len(found)} refinements is "
                             f"free of what was poor")
        write_rows(out / "refinements.jsonl", found)
        return f"{kept} of {len(found)} kept"
    annotate_rows(model, tokenizer, rows, config, out)
    phase("refine", "refinements.jsonl", out, lambda: once(work))


def ilf(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """Imitation learning from language feedback (Scheurer et al. 2023): −E log π(y⁺|x)."""
    def work():
        kept = [row for row in read_rows(out / "refinements.jsonl") if row["kept"]]
        pairs = [(row["prompt"], row["refinement"]) for row in kept]
        return imitate(model, tokenizer, pairs, config, out)
    refine(model, tokenizer, rows, config, out)
    phase("imitate refinements", "policy", out, work)


def reflection(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """SFT, R_φ, and with a refiner "rewriter", which learns −E log π'(y⁺ | x, y, c)."""
    sft(model, tokenizer, rows, config, out)
    if config.reward_model is None:
        annotate_rows(model, tokenizer, rows, config, out)
        phase("reward model", "reward/metrics.json", out,
              lambda: fit_reward(model, tokenizer, config, out))
    load_absent(model, "reward", config.reward_model or out / "reward" / "adapter")
    if config.refiner != "none":
        refine(model, tokenizer, rows, config, out)
        phase("rewriter", "rewriter", out, lambda: fit_rewriter(model, tokenizer, config, out))
        load_absent(model, "rewriter", out / "rewriter")


def fit_rewriter(model, tokenizer, config: BaselineConfig, out: Path) -> str:
    """The adapter "rewriter" from the refinements that were kept."""
    pairs = encode_rewriting(read_rows(out / "refinements.jsonl"), tokenizer)
    return fit_and_keep(model, tokenizer, fitting_ids(pairs, model, "refinements"), "rewriter",
                        reward_settings(config), out / "rewriter")


def encode_rewriting(rows: list[dict], tokenizer) -> list[tuple]:
    """((x, y, c), y⁺) as ids, of the refinements that were kept."""
    kept = [row for row in rows if row["kept"]]
    asked = [refine_prompt(row["prompt"], row["response"], row["critique"]) for row in kept]
    return encode_answers(zip(asked, (row["refinement"] for row in kept)), tokenizer)


def pair_rows(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """Rows → preferences.jsonl."""
    def work():
        found = preferences(model, tokenizer, rows[: config.annotated_rows], config)
        write_rows(out / "preferences.jsonl", found)
        return f"{len(found)} pairs"
    phase("preferences", "preferences.jsonl", out, lambda: once(work))


def dpo(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """Direct preference optimisation: −log σ(β(Δ_w − Δ_l)) over preferences.jsonl."""
    pair_rows(model, tokenizer, rows, config, out)
    phase("dpo", "policy", out, lambda: fit_preferences(model, tokenizer, config, out))


def score(model, tokenizer, rows, config: BaselineConfig, out: Path):
    """PPO and PRM-PPO: the reward model; the rest is phase 3 of text2grad.py as it is."""
    if config.reward_model is None:
        make_rows = annotate_rows if config.method == "prm_ppo" else pair_rows
        make_rows(model, tokenizer, rows, config, out)
        phase("reward model", "reward/metrics.json", out,
              lambda: fit_scores(model, tokenizer, config, out))
    load_absent(model, "reward", config.reward_model or out / "reward" / "adapter")
    start_policy(model, config)


# ── The table

def reflect(rollouts: Rollouts, model, tokenizer, config: BaselineConfig) -> Rollouts:
    """z' of R_φ and y' ~ π'(· | x, y, z') for rollouts of y: rollouts of y'."""
    rewriter = "rewriter" if lora_parameters(model, "rewriter") else "policy"
    own = share(rollouts)
    x, y = ([texts[i] for i in own] for texts in (rollouts.prompts, rollouts.texts))
    critiques = write_critiques(model, tokenizer, x, y, config.max_critique_tokens)
    asked = [refine_prompt(*said, spoken(z)) for *said, z in zip(x, y, critiques)]
    most = config.max_new_tokens
    drawn = [own_uniforms(rollouts, i, config, (1, most)) for i in own]
    uniforms = torch.cat([torch.empty(0, most), *drawn])               # a rank may have no row
    ids = everyone(sample(model, tokenizer, asked, config, rewriter, uniforms))
    texts, offsets = zip(*(token_offsets(tokenizer, y) for y in ids))
    prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in rollouts.prompts]
    padded = pad_batch(prompt_ids, ids, tokenizer.pad_token_id or 0, model.device)
    return Rollouts(rollouts.rows, rollouts.prompts, list(texts), list(offsets), *padded)


def reflected(rollouts: Rollouts, model, tokenizer, config: BaselineConfig):
    """R_φ judges second answers, which take the place of the first ones in the rollouts."""
    vars(rollouts).update(vars(reflect(rollouts, model, tokenizer, config)))
    return critique(rollouts, model, tokenizer, config)


def compare(model, tokenizer, held_out: list[dict], config: BaselineConfig, out: Path):
    """The table before and after, where the policy is fitted to rows → result.json."""
    if everyone([(out / "result.json").exists()])[0]:
        return say(f"evaluate: reused {out / 'result.json'}")
    load_absent(model, "policy", out / "policy")
    critic = critic_of(config)
    if critic is critique:
        load_absent(model, "reward", config.reward_model)
    plain, result = critique if critic is reflected else critic, {}
    columns = [("before", config.reference, plain), ("after", "policy", critic)]
    if critic is reflected:
        columns.insert(1, ("without reflection", "policy", critique))
    for name, adapter, who in columns:
        result[name], _ = evaluate(model, tokenizer, held_out, config, adapter, who)
    if RANK == 0:
        write_rows(out / "result.json", [result])


def bind(config: BaselineConfig, out: Path):
    """A directory is of one method and one set of settings, from its first run on."""
    kept, now = out / "config.json", settings(config)
    before = read_rows(kept)[0] if kept.exists() else now
    changed = [f"{name} was {before.get(name)}, is {value}" for name, value in now.items()
               if before.get(name) != value and name not in FREE]
    if changed:
        raise InputError(f"{out} was made with other settings ({'; '.join(changed)}); choose "
                         f"another --output_dir")
    if RANK == 0:
        write_rows(kept, [now])


METHOD = {"sft": sft, "ilf": ilf, "reflection": reflection, "dpo": dpo, "ppo": score,
          "prm_ppo": score}


def main(argv=None):
    """One baseline, from rows to the table before and after."""
    argv = sys.argv[1:] if argv is None else argv
    config = complete(parse_flags(BaselineConfig, argv, __doc__, own_preset))
    out, started = Path(config.output_dir), time.time()
    # Where nobody is asked, no key is needed: some function stands for the annotator.
    asks = config.method in ("ilf", "reflection", "prm_ppo")
    check(config, out, asks)
    if config.refiner != "none":
        load_object("--refiner", config.refiner)
    device = start_ranks(minutes=30.0)
    rows, held_out = split_prompts(config)
    dtype = config.dtype or ("bfloat16" if device.type == "cuda" else None)
    model, tokenizer = load_model(config.model, dtype, device)
    rows, held_out = (fitting(part, model, tokenizer, config) for part in (rows, held_out))
    if config.adapter:
        load_lora(model, "reference", config.adapter)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    out.mkdir(parents=True, exist_ok=True)
    _lock = lock_directory(out)                                # held until the process ends
    bind(config, out)
    say(f"{config.method} on {config.task}: {config.model}, {len(rows)} training prompts, "
        f"{device}; files in {out}/")
    METHOD[config.method](model, tokenizer, rows, config, out)
    learns = config.method in ("ppo", "prm_ppo")
    if learns:
        if config.shard:
            shard(model)
        optimise(model, tokenizer, rows, held_out, config, out, critic_of(config))
    else:
        compare(model, tokenizer, held_out, config, out)
    if RANK == 0:
        result = read_rows(out / "result.json")[0]
        lines = [[key, *(column[key] for column in result.values())]
                 for key in result["before"]]
        print(table([f"{len(held_out)} held-out prompts", *result], lines))
        if learns:
            print(f"look at {run_report(out)}")
        other = METHODS[METHODS.index(config.method) - 1]
        print(f"\n{time.time() - started:.0f} s in all. In {out}/: policy/ (PEFT format) and "
              f"what it was made of.\nnext: the same rows by another method: python -m "
              f"experiments.baselines --method {other} --output_dir {out}-other")
    together(dist.destroy_process_group)


if __name__ == "__main__":
    run_script(main, "baselines", SandboxError, torch.OutOfMemoryError)
