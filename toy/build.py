"""Rebuild the toy base model and its tokenizer:

    python -m toy.build [DIRECTORY]      # by default toy/base; see toy/README.md for the time

The tokenizer is a byte-level BPE; the model is a Llama with 0.69 million parameters. It is
trained by cross-entropy on answers to four instructions. One is to summarise a post; its
answers contain errors, some of which are more likely than the truth. The other three are
reading exercises with correct answers: quote named facts as JSON, check named facts of a
response against the post, and compare pairs of facts. They teach what the paper's
Llama-3.1-8B-Instruct already knows. R_φ still has to learn to write a whole critique and to
choose spans by its judgement, because the training data has neither. No sentence of the
annotator is in the answers or in the tokenizer's training text.
"""

import json
import math
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import toy
from data import chunks, critique_prompt
from model import encode_answer, encode_prompt, response_hidden
from sampling import head_weight, pad_batch

KINDS = ("summarise", "quote", "check", "compare")
STEPS = 2200            # of training, with 32 exercises each
EASY_STEPS = 250        # the first of them, with easy exercises only (see `exercise`)

# What "check" and "compare" answer if the summary keeps a fact, and if not. The annotator has
# other sentences and other words for right and wrong (toy.RIGHT and toy.WRONG).
ANSWERS = [
    ("{slot}: {summary} against {post}, same.", "{slot}: {summary} against {post}, another."),
    ("{slot}: {post} stays.", "{slot}: {post} turns into {summary}.")]
# Further words that the tokenizer learns, besides those of the exercises.
WORDS = "right wrong correct missing twice answer true instead happened sounds repeats reader"


def exercise(rng: random.Random, easy_share: float = 0.0) -> tuple[str, str]:
    """(prompt, answer) of a random exercise, from a row of the base split.

    The facts of "compare" are random and belong to no row. easy_share: probability of an easy
    exercise, which is "compare" with the first form of ANSWERS, without quotation marks.
    """
    kind = rng.choice(KINDS)
    is_easy = rng.random() < easy_share
    if is_easy:
        kind = "compare"
    length = rng.choice((1, 2, 2, 3, 4))
    row = toy.rows("base", 1, rng.getrandbits(64), length)[0]
    facts = row["facts"]
    if kind == "summarise":
        return toy.prompt(row), toy.write_draft(facts, rng)
    stated = {slot: other_fact(slot, fact, rng) for slot, fact in facts.items()}
    response = toy.write_summary(stated, rng, 0.5)
    faults = [quote for _, quote in toy.faults(response)]
    if kind == "quote":
        texts = [(f"Post: {row['post']}", facts, []),
                 (f"Response: {response}", stated, faults)]
        return quotation(*rng.choice(texts), rng)
    slots = rng.sample(list(facts), min(len(facts), rng.randint(3, 6)))
    if kind == "compare":
        facts = {slot: rng.choice(values) for slot, values in toy.SLOTS.items()}
        stated = {slot: other_fact(slot, fact, rng) for slot, fact in facts.items()}
        slots = rng.sample(list(facts), 7)
    form = rng.choice(ANSWERS)
    mark = rng.choice(("", '"'))
    if is_easy:
        form, mark = ANSWERS[0], ""
    pairs = [(slot, toy.plain(stated[slot]), toy.plain(facts[slot])) for slot in slots]
    answers = [form[value != fact].format(
        slot=slot, summary=f"{mark}{value}{mark}", post=f"{mark}{fact}{mark}")
        for slot, value, fact in pairs]
    if kind == "compare":
        pairs = "; ".join(f"{slot} {value}, {fact}" for slot, value, fact in pairs)
        return f"Compare: {pairs}.", " ".join(answers)
    if rng.random() < 0.75:
        slots.append("style")
        answers += [f"{quote[2:]}: again." if quote[0] == "," else f"{quote}: first person."
                    for quote in faults]
    return (f"{toy.prompt(row)}\n\nResponse: {response}\n\nDoes the summary say what the post "
            f"says? Check the {', the '.join(slots)}.", " ".join(answers))


def other_fact(slot: str, fact: str, rng: random.Random) -> str:
    """The fact with probability 0.5, its neighbour with 0.25, or a random one of its slot."""
    values = toy.SLOTS[slot]
    chance = rng.random()
    if chance < 0.5:
        return fact
    return values[values.index(fact) ^ 1] if chance < 0.75 else rng.choice(values)


def quotation(text: str, facts: dict[str, str], faults: list[str],
              rng: random.Random) -> tuple[str, str]:
    """(prompt, answer) of the exercise "quote": the prompt names facts of a text to quote.

    The answer has two lists of quotes, in the order of the text. With probability 0.5, the
    faults of style follow the poor facts.
    """
    labels = {slot: rng.choice(("good", "poor", "no")) for slot in facts}
    names = {}
    lists = {}
    for label in ("good", "poor"):
        slots = [slot for slot in facts if labels[slot] == label]
        names[label] = ", ".join(slots) or "nothing"
        lists[f"{label}_spans"] = sorted((facts[slot] for slot in slots), key=text.find)
    if faults and rng.random() < 0.5:
        names["poor"] += ", style"
        lists["poor_spans"] += faults
    return (f"{text}\n\nQuote in good_spans: {names['good']}. "
            f"Quote in poor_spans: {names['poor']}.", json.dumps(lists))


def tokenizer_texts(seed: int) -> list[str]:
    """What the tokenizer is trained on: posts, summaries, exercises and single words."""
    rng = random.Random(seed)
    texts = [f" {word}" for word in toy.FUNCTION_WORDS + WORDS.split()] * 300
    for length in toy.LENGTHS:
        for row in toy.rows("base", 1500, seed, length):
            summary = toy.write_draft(row["facts"], rng)
            texts += exercise(rng)
            texts.append(critique_prompt(toy.prompt(row), summary))
    return texts


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the `tokenizer_texts`, so that they become few tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=960, special_tokens=["<pad>", "<eos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(tokenizer_texts(seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>",
        clean_up_tokenization_spaces=False, model_max_length=512)


def learning_share(step: int) -> float:
    """Learning rate factor: 120 steps of warm-up, constant until EASY_STEPS, cosine to 0."""
    decayed = max(0, step - EASY_STEPS) / (STEPS - EASY_STEPS)
    return min(1, (step + 1) / 120) * 0.5 * (1 + math.cos(math.pi * decayed))


def main(directory: Path, seed: int = 0):
    """Train the tokenizer and the model, and save them in Hugging Face format."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    start = time.time()
    tokenizer = train_tokenizer(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=320, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512,
        tie_word_embeddings=True, rope_theta=10000.0, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01,
                                  betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_share)
    for step in tqdm(range(STEPS), desc="toy base"):
        # "compare" is learnt fast if it comes alone. Then the share of the rest rises.
        easy_share = 1 if step < EASY_STEPS else max(0.15, 0.9 * (700 - step) / 450)
        pairs = [exercise(rng, easy_share) for _ in range(32)]
        pairs = [(encode_prompt(tokenizer, x), encode_answer(tokenizer, y)) for x, y in pairs]
        pairs.sort(key=lambda pair: sum(map(len, pair)))
        n_tokens = sum(len(answer) for _, answer in pairs)
        total_loss = 0.0
        for micro_batch in chunks(pairs, 16):      # similar lengths need less padding
            batch = pad_batch(*zip(*micro_batch))
            mask = batch[3].bool()                                                  # [B, T]
            logits = response_hidden(model, *batch)[mask] @ head_weight(model).T
            loss = F.cross_entropy(logits, batch[2][mask], reduction="sum") / n_tokens
            loss.backward()
            total_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    print(f"{directory}: loss {total_loss:.3f}, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else toy.BASE)
