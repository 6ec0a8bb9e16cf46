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
        φ ← R_φ trained on all (x, y, z)                fit_reward_model     l.13–14  phase 2
        θ ← π_θ trained with the critiques of R_φ       train_and_evaluate   l.16–19  phase 3

`main` makes these four calls. In phase 3 a critic reviews each new response: R_φ, or the
annotator itself (--critic). The critic of actor–critic methods is something else: the value
head V_ψ. Departures: if a row of --data has a response already, phase 1 samples no new one. The
policy answers held-out prompts before and after its training, and the critic reviews the
answers. The same command continues a stopped run.
"""

from dataclasses import replace
from pathlib import Path

import torch

from annotate import annotate, check_annotator
from ask import Function
from data import get_task, load_rows, run_script, write_rows
from model import (add_lora, drop_long_rows, load_lora, load_model, lora_parameters,
                   target_layers, unsharded)
from policy import (CRITICS, add_advantages, add_feedback, annotator_critic, answer_row,
                    reward_model_critic, sample_rollouts, train, with_outcomes)
from report import describe_critiques, load_tracker, measure_held_out, print_result
from reward_model import fit_reward_model
from runtime import (RANK, check_batches, check_ranks, gather_rows, lock_directory, print_rank0,
                     rank_share, reward_model_hint, run_phase, save_settings, start_ranks,
                     stop_ranks)
from settings import Config, derive_settings, parse_flags


# ── Algorithm 1

def main(config: Config, critic=None, advantages=add_advantages):
    """Algorithm 1: annotate, train R_φ, optimise the policy.

    critic, advantages: see `train`. critic=None: the one that --critic names. experiments/ has
    others.
    """
    # The base, its tokenizer, the prompts x, and the settings. The adapter "policy" is π_θ.
    model, tokenizer, rows, held_out, config, _lock = prepare(config)
    out = Path(config.output_dir)
    if config.preview:
        # Without an R_φ, the annotator is the critic. R_φ will learn to write such critiques.
        name = config.critic if config.reward_model else "annotator"
        evaluate_reference(model, tokenizer, held_out[: config.preview],
                           replace(config, critic=name), critic or CRITICS[name])
        return stop_ranks()
    # Each call of `run_phase` names a phase and the file that the phase writes last. If the
    # file exists, the phase is not run again. So the same command continues a stopped run.
    # Phases 1 and 2 make R_φ. They are left out if the annotator itself is the critic, or if
    # --reward_model names an R_φ of an earlier run.
    if config.critic == "reward_model" and not config.reward_model:
        run_phase("phase 1, respond", "responses.jsonl", out, lambda: write_responses(
            model, tokenizer, rows[: config.annotated_rows], config, out))              # l.4–6
        run_phase("phase 1, annotate", "feedback.jsonl", out, lambda: annotate(
            config, out / "responses.jsonl", out / "feedback.jsonl"),                  # l.7–11
            only_rank0=True)
        run_phase("phase 2, reward model", "reward/metrics.json", out, lambda: fit_reward_model(
            model, tokenizer, config, out / "feedback.jsonl", out / "reward"))        # l.13–14
        if not lora_parameters(model, "reward"):                # trained in an earlier run
            load_lora(model, "reward", out / "reward/adapter")
    run_phase("phase 3, policy", "result.json", out, lambda: train_and_evaluate(
        model, tokenizer, rows, held_out, config, out, critic or CRITICS[config.critic],
        advantages))                                                                  # l.16–19
    if RANK == 0:
        print_result(out, reward_model_hint(out))
    stop_ranks()


def write_responses(model, tokenizer, rows: list[dict], config: Config, out: Path) -> str:
    """Alg. 1 l.6: π_ref answers the rows that have no response → responses.jsonl."""
    task = get_task(config.task)
    # Rows of SLF5K, UltraFeedback and KodCode hold responses already.
    with_response = [row for row in rows if task.all_responses(row)]
    without_response = [row for row in rows if not task.all_responses(row)]
    if without_response:
        # Sampling needs all weights on each rank. --shard has split them.
        with unsharded(model):
            batch = sample_rollouts(
                model, tokenizer, without_response, config, config.reference,
                torch.Generator().manual_seed(config.seed))
        with_response += map(answer_row, without_response, batch.texts)                 # l.6
    # KodCode: the annotator reads the outcomes of the tests. Each rank runs a part of them.
    with_response = gather_rows(with_outcomes(rank_share(with_response), task, config))
    if RANK == 0:
        write_rows(out / "responses.jsonl", with_response)
    return f"{len(without_response)} responses sampled"


def train_and_evaluate(model, tokenizer, rows, held_out, config: Config, out: Path,
                       critic, advantages=add_advantages) -> str:
    """Phase 3 (Alg. 1 l.16–19), with an evaluation before and after → policy/, result.json."""
    before, samples = evaluate_reference(model, tokenizer, held_out, config, critic)
    if RANK == 0:
        write_rows(out / "held_out.jsonl", held_out)
        write_rows(out / "before_samples.jsonl", samples)
    train(model, tokenizer, rows, config, out, critic, advantages)                      # l.18
    after, samples = evaluate(model, tokenizer, held_out, config, "policy", critic)
    if RANK == 0:
        write_rows(out / "after_samples.jsonl", samples)
        write_rows(out / "result.json", [{"before": before, "after": after}])
    return f"{config.iterations} iterations"


def evaluate_reference(model, tokenizer, rows, config: Config, critic):
    """Evaluate π_ref, and print what phase 3 can learn from the critiques of its responses.

    Returns what `evaluate` returns. Raises InputError if nothing can be learned, for example
    because the critic quotes nothing.
    """
    before, samples = evaluate(model, tokenizer, rows, config, config.reference, critic)
    print_rank0(describe_critiques(samples, config.critic, config.preview or 5, before))
    return before, samples


def evaluate(model, tokenizer, rows, config: Config, adapter, critic):
    """Sample a response to each held-out row, and let the critic review it (Alg. 4 l.8–13).

    Returns (the means of all metrics, the samples).
    """
    # The same random numbers before and after training, so that only the policy differs.
    generator = torch.Generator().manual_seed(config.seed)
    with unsharded(model):
        batch = sample_rollouts(model, tokenizer, rows, config, adapter, generator)
        add_feedback(batch, critic(batch, model, tokenizer, config))
    # An annotator that is a function costs nothing. So it reviews the same responses, and is
    # compared with R_φ. After training, R_φ may find a smaller share of the errors, because the
    # policy has learned to avoid those that R_φ finds.
    truth = ()
    if critic is reward_model_critic and config.annotator_function:
        truth = gather_rows(annotator_critic(batch, model, tokenizer, config))
    return measure_held_out(batch, truth)


# ── Before the first phase

def prepare(config: Config, needs_annotator=True, **names):
    """Load the model and the rows, and check the settings before anything is sampled or paid.

    Returns (model, tokenizer, training rows, held-out rows, config, lock). In this config, the
    output directory, the number of iterations and the learning rates are no longer None. The
    lock is an open file; until it is closed, no other run can use the run directory. names:
    further entries of config.json. Raises InputError if a check fails.
    """
    # First the quick checks: flags, annotator, rows. Then the model, which takes longer.
    task = get_task(config.task)
    config = replace(config, output_dir=str(config.output_dir or f"runs/{task.name}"))
    out = Path(config.output_dir)
    check_batches(config)
    if config.wandb:
        load_tracker()
    if needs_annotator:
        check_annotator(task, config)
    lock = lock_directory(out)
    training, held_out = load_rows(task, config)
    model, tokenizer = load_model(config.model, config.dtype, start_ranks(), config.shard,
                                  config.activation_checkpointing)
    # x, y and z must fit the context together, or R_φ could not review the response.
    rows = drop_long_rows(training, task, model, tokenizer, config)
    held_out = drop_long_rows(held_out, task, model, tokenizer, config)
    # Some defaults depend on the number of rows and the size of the model.
    config = derive_settings(config, len(rows), model)
    target_layers(model, config.reward_lora_targets.split(","))          # raises InputError
    if config.reward_model:
        load_lora(model, "reward", config.reward_model)
    start_policy(model, config)
    # All ranks (processes) must have the same settings and rows. A run directory has the
    # results of one config only.
    check_ranks([vars(config), rows, held_out])
    function = config.annotator_function
    if names or not config.preview:                  # a preview fits every run directory
        save_settings(config, out, function_files=function and Function(function).source,
                      **names)
    return model, tokenizer, rows, held_out, config, lock


def start_policy(model, config: Config):
    """Create the adapter "policy", or load it and π_ref from --adapter (Alg. 1 l.17)."""
    # π_θ starts as π_ref. An SFT adapter is loaded twice; the copy "reference" is not trained.
    if config.adapter:
        load_lora(model, "reference", config.adapter)
        load_lora(model, "policy", config.adapter)
    else:
        # B = 0, so that the new adapter changes nothing at first.
        torch.manual_seed(config.seed)
        add_lora(model, "policy", config.lora_r, config.lora_alpha, 0.0,
                 config.lora_targets.split(","))


if __name__ == "__main__":
    run_script(lambda: main(parse_flags(Config, __doc__)), "text2grad")
