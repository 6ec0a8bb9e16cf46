"""Algorithm 1: from prompts to a policy that was trained with natural-language feedback.

    python text2grad.py                              # all three phases on the toy world
    torchrun --nproc_per_node 8 text2grad.py --task slf5k --data slf5k.jsonl \\
             --model meta-llama/Llama-3.1-8B-Instruct --batch_size 96 --minibatch_size 96

Text2Grad (arXiv 2505.22338) has four algorithms, and each has one file, to read in this order:

    annotate.py       Alg. 2   critique of y → its quotes → spans → δ_t ∈ {−1, 0, +1}
    reward_model.py   Alg. 3   R_φ learns to write the critiques z: −E[log p_φ(z | x, y)]
    policy.py         Alg. 4   y ~ π_θ, z' ~ R_φ, δ'_t, r_t = δ'_t + r_t^KL, GAE, PPO
    text2grad.py      Alg. 1   the whole run:

        y ~ π_ref(·|x) for each prompt x                write_responses      l.5–6    phase 1
        z = (critique, spans) of each (x, y)            annotate             l.7–11   phase 1
        φ ← R_φ trained on all (x, y, z)                fit                  l.13–14  phase 2
        θ ← π_θ trained with the critiques of R_φ       train_and_evaluate   l.16–19  phase 3

`run_phases` makes these four calls. Departures: a row of --data that already has a
response is not sampled again. Held-out prompts are judged before and after phase 3. The same
command continues a stopped run.
"""

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from annotate import annotate, function_hash, load_annotator
from data import InputError, get_task, read_rows, reward_prompt, run_script, write_rows
from model import (add_lora, encode_prompt, gathered, load_lora, load_model, lora_parameters,
                   target_layers)
from policy import (add_advantages, add_feedback, quote_shares, response_scores,
                    reward_model_critic, sample_rollouts, sample_row, train)
from report import print_examples, print_result
from reward_model import annotator_critic, fit, split_rows, summary
from runtime import (RANK, WORLD_SIZE, check_ranks, gather_rows, lock_directory, on_rank0,
                     print_rank0, reward_model_hint, run_collective, run_phase, save_settings,
                     start_ranks)
from sampling import context_length
from settings import Config, derive_settings, parse_flags


# ── Algorithm 1: annotate, train R_φ, optimise the policy

def run_phases(model, tokenizer, rows, held_out, config: Config, out: Path,
               needs_reward_model: bool, critic, advantages):
    """Algorithm 1. A phase whose last file exists in the run directory `out` is over."""
    feedback = out / "feedback.jsonl"
    if needs_reward_model and not config.reward_model:
        annotation_rows = rows[: config.annotated_rows]
        run_phase("phase 1, respond", "responses.jsonl", out,
                  lambda: write_responses(model, tokenizer, annotation_rows, config,
                                          out))                                        # l.4–6
        run_phase("phase 1, annotate", "feedback.jsonl", out,
                  lambda: on_rank0(annotate, config, out / "responses.jsonl",
                                   feedback))                                         # l.7–11
        run_phase("phase 2, reward model", "reward/metrics.json", out,
                  lambda: summary(fit(model, tokenizer, config, feedback,
                                      out / "reward")))                              # l.13–14
        if not lora_parameters(model, "reward"):                # trained in an earlier run
            load_lora(model, "reward", out / "reward" / "adapter")
    run_phase("phase 3, policy", "result.json", out,
              lambda: train_and_evaluate(model, tokenizer, rows, held_out, config, out,
                                         critic, advantages))                        # l.16–19


def write_responses(model, tokenizer, rows: list[dict], config: Config, out: Path) -> str:
    """Alg. 1 l.6: π_ref answers the rows that have no response → responses.jsonl."""
    task = get_task(config.task)
    generator = torch.Generator().manual_seed(config.seed)
    with_response = [row for row in rows if task.all_responses(row)]
    without_response = [row for row in rows if not task.all_responses(row)
                        for _ in range(config.annotated_responses_per_prompt)]
    if without_response:
        with gathered(model):
            batch = sample_rollouts(model, tokenizer, without_response, config,
                                    config.reference, generator)
        with_response += [row | {"response": y}
                          for row, y in zip(without_response, batch.texts)]             # l.6
    if task.tests and config.allow_code_execution:
        from measures.sandbox import add_outcomes
        with_response = gather_rows(add_outcomes(with_response[RANK::WORLD_SIZE], task))
    if RANK == 0:
        write_rows(out / "responses.jsonl", with_response)
    return f"{len(with_response)} responses, {len(without_response)} of them sampled"


def train_and_evaluate(model, tokenizer, rows, held_out, config: Config, out: Path,
                       critic=reward_model_critic, advantages=add_advantages) -> str:
    """Phase 3 (Alg. 1 l.16–19), with an evaluation before and after → policy/, result.json."""
    before, samples = evaluate(model, tokenizer, held_out, config, config.reference, critic)
    if RANK == 0:
        write_rows(out / "held_out.jsonl", held_out)
        write_rows(out / "before_samples.jsonl", samples)
        print_examples(samples)
    check_critiques(before, samples)
    train(model, tokenizer, rows, config, out, critic, advantages)                      # l.18
    after, samples = evaluate(model, tokenizer, held_out, config, "policy", critic)
    if RANK == 0:
        write_rows(out / "after_samples.jsonl", samples)
        write_rows(out / "result.json", [{"before": before, "after": after}])
    return f"{config.iterations} iterations"


def evaluate(model, tokenizer, rows, config: Config, adapter, critic=reward_model_critic):
    """Sample a response to each held-out row and let the critic judge it.

    Returns (the means of all metrics, the samples).
    """
    generator = torch.Generator().manual_seed(config.seed)
    with gathered(model):
        batch = sample_rollouts(model, tokenizer, rows, config, adapter, generator)
        add_feedback(batch, critic(batch, model, tokenizer, config))
    scores = response_scores(batch, get_task(config.task))
    samples = [{"id": row.get("id"), **sample_row(batch, i), "scores": scores[i]}
               for i, row in enumerate(rows)]
    means = {name: sum(score[name] for score in scores) / len(scores) for name in scores[0]}
    return means | quote_shares(batch.feedback), samples


MOST_UNREADABLE = 0.5                     # share of critiques; phase 3 does not start above it
ALL_TOKENS = 0.9                          # share of good or of poor tokens; a warning above it


def check_critiques(means: dict, samples: list[dict]):
    """Print what phase 3 will learn from. Raises InputError if most critiques are unreadable.

    means: of the held-out responses before training, see `evaluate`.
    """
    shares = [f"{name} {means[name]:.0%}" for name in
              ("good", "poor", "conflicting", "unmatched", "ambiguous", "unparseable")]
    print_rank0(f"before phase 3, shares of tokens, quotes and critiques: {', '.join(shares)}")
    reasons = Counter(sample["unreadable"] for sample in samples if sample["unreadable"])
    if means["unparseable"] > MOST_UNREADABLE:
        raise InputError(f"{means['unparseable']:.0%} of the critiques cannot be read and give "
                         f"no reward (most often: {reasons.most_common(1)[0][0]}); train R_φ "
                         f"again with a higher --reward_learning_rate, more --reward_epochs or "
                         f"more rows, or raise --max_critique_tokens")
    if not 0 < max(means["good"], means["poor"]) < ALL_TOKENS:
        print_rank0("warning: δ is nearly the same for every token: nothing can be learned")


# ── Rows and checks, before anything is sampled or paid

def load_rows(config: Config) -> tuple[list[dict], list[dict]]:
    """(training rows, held-out rows) (§4.1). No held-out prompt is trained on or annotated.

    The seed shuffles the training rows. One row is kept per held-out prompt. Raises InputError
    where all rows have the same prompt.
    """
    task = get_task(config.task)
    if config.data is None:
        training = task.rows("train", config.annotated_rows, config.seed)
        evaluation = task.rows("eval", config.eval_rows, 0)
        for row in training + evaluation:
            task.check(row, f"--task {config.task}, its `rows`")
        return training, evaluation
    rows = read_rows(config.data, task=task)
    shuffled = random.Random(config.seed).sample(rows, len(rows))
    training, evaluation = split_rows(shuffled, config.eval_rows, config.seed,
                                      task.policy_prompt, least=1)
    if not training:
        raise InputError(f"{config.data}: all rows have the same prompt; add rows with another "
                         f"prompt, because one prompt is held out for evaluation")
    return training, [*{str(task.policy_prompt(row)): row for row in evaluation}.values()]


def drop_long_rows(rows: list[dict], model, tokenizer, config) -> list[dict]:
    """Keep rows whose prompt, response and critique fit the context; print how many do not.

    Raises InputError where no row fits.
    """
    instruction = len(encode_prompt(tokenizer, reward_prompt("", "")))
    answers = config.max_new_tokens + config.max_critique_tokens
    room = context_length(model) - instruction - answers
    limit = min(room, config.max_prompt_tokens or room)
    prompt = get_task(config.task).policy_prompt
    fitting_rows = [row for row in rows if len(encode_prompt(tokenizer, prompt(row))) <= limit]
    problem = (f"{len(rows) - len(fitting_rows)} of {len(rows)} prompts have more than {limit} "
               f"tokens")
    if not fitting_rows:
        raise InputError(f"{problem}: lower --max_new_tokens or --max_critique_tokens, or "
                         f"raise --max_prompt_tokens if it is set")
    if len(fitting_rows) < len(rows):
        print_rank0(f"left out: {problem}")
    return fitting_rows


def check_config(config: Config, out: Path, needs_reward_model: bool):
    """Check ranks, data and annotator. Raises InputError where they cannot work."""
    task = get_task(config.task)
    unit = math.lcm(WORLD_SIZE, config.responses_per_prompt)
    if config.batch_size % unit or config.minibatch_size % WORLD_SIZE:
        raise InputError(f"ranks share each batch equally: set --batch_size to a multiple of "
                         f"{unit} and --minibatch_size to a multiple of {WORLD_SIZE}")
    if config.data is None and task.rows is None:
        raise InputError(f"--task {config.task} needs --data rows.jsonl")
    is_paid = not config.annotator_function
    if config.critic == "annotator" and is_paid and config.max_usd is None:
        raise InputError("--critic annotator asks the server about every rollout: set "
                         "--max_usd with --price_in and --price_out, or --annotator_function")
    has_feedback = config.reward_model or (out / "feedback.jsonl").exists()
    if config.critic == "annotator" or (needs_reward_model and not has_feedback):
        load_annotator(config)
        if task.tests and is_paid and not config.allow_code_execution:
            raise InputError("the annotator needs the outcomes of the tests: set "
                             "--allow_code_execution to run them in the sandbox")


def start_policy(model, config: Config):
    """Create the adapter "policy", or load it and π_ref from --adapter (Alg. 1 l.17)."""
    if config.adapter:
        load_lora(model, "reference", config.adapter)
        load_lora(model, "policy", config.adapter)
    else:
        torch.manual_seed(config.seed)
        add_lora(model, "policy", config.lora_r, config.lora_alpha, 0.0,
                 config.lora_targets.split(","))


# ── The script

def main(config: Config, critic=None, needs_reward_model=True, advantages=add_advantages):
    """Check everything, then run Algorithm 1. The other arguments serve experiments/.

    critic, advantages: see `train`; None is the critic of --critic. needs_reward_model: whether
    the critic uses R_φ, so that phases 1 and 2 must train it.
    """
    if config.critic == "annotator":
        needs_reward_model = False
    critic = critic or (reward_model_critic if needs_reward_model else annotator_critic)
    out = Path(config.output_dir or f"runs/{get_task(config.task).name}")
    config = replace(config, output_dir=str(out))
    check_config(config, out, needs_reward_model)
    device = start_ranks()
    _lock = lock_directory(out)                               # held until the process ends
    rows, held_out = load_rows(config)
    model, tokenizer = load_model(config.model, config.dtype, device, config.shard,
                                  config.activation_checkpointing)
    rows = drop_long_rows(rows, model, tokenizer, config)
    held_out = drop_long_rows(held_out, model, tokenizer, config)
    config = derive_settings(config, len(rows), model)
    target_layers(model, config.reward_lora_targets.split(","))
    if config.reward_model:
        load_lora(model, "reward", config.reward_model)
    start_policy(model, config)
    check_ranks([vars(config), rows, held_out])
    function = config.annotator_function
    save_settings(config, out,
                  critic_name="R_φ" if needs_reward_model else config.annotator,
                  function_hash=function and function_hash(function))
    print_rank0(f"{len(rows)} training prompts, {config.iterations} iterations of "
                f"{config.batch_size} rollouts, learning rate {config.learning_rate:.2g}, "
                f"{device}; files in {out}/")
    run_phases(model, tokenizer, rows, held_out, config, out, needs_reward_model, critic,
               advantages)
    if RANK == 0:
        print_result(out, reward_model_hint(out))
    run_collective(dist.destroy_process_group)


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, __doc__)), "text2grad")
