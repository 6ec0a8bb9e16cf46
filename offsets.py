"""Which characters of the decoded text a sampled token wrote: what stands between y_t and a span s_k (§3.3).

    text, offsets = token_offsets(tokenizer, token_ids)          # text[start:end] for every id

Paper: Appendix L, "Robustness to Tokenization Mismatch".

Departure from the paper: Appendix L encodes the text again to align it; what is trained are the ids that were sampled,
so offsets are computed from these ids, and no tokenizer's own offsets are trusted. Nothing here needs torch.
"""

from __future__ import annotations

import os


def token_offsets(tokenizer, token_ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """The decoded text and, for every id, the characters [start, end) that it wrote (Appendix L, steps 2 and 3).

    Decodes the ids piece by piece, so it holds for byte-level BPE and for SentencePiece with byte fallback, and never
    encodes anything. Ids that share one character (an emoji of several byte tokens) all get that character; special
    tokens write nothing and get an empty interval.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)       # the same decoder, without the cost of the wrapper
    plain = {} if fast else {"clean_up_tokenization_spaces": False}

    def decode(ids):
        return (fast or tokenizer).decode(ids, skip_special_tokens=True, **plain)

    special, text, offsets, at = set(tokenizer.all_special_ids), decode(token_ids), [], 0
    before = begin = 0                 # ids[before:begin] is the piece before: with it, this one keeps its leading space
    for end in range(1, len(token_ids) + 1):
        piece = decode(token_ids[before:end])
        if piece.endswith("\ufffd") and end < len(token_ids):
            continue                       # perhaps in the middle of a character
        context = decode(token_ids[before:begin])
        offsets += _piece_offsets(decode, special, token_ids[before:begin], token_ids[begin:end], piece, len(context), at)
        at += len(piece) - len(context)
        before, begin = (begin if len(piece) > len(context) else before), end
    if at != len(text):                    # bytes that are no characters: only the whole says how they are written
        offsets = _piece_offsets(decode, special, [], token_ids, text, 0, 0)
    return text, offsets


def _piece_offsets(decode, special, context, ids, text: str, known: int, at: int) -> list[tuple[int, int]]:
    """Intervals of a few ids that make up text[known:], shifted to start at `at`: read the text after each of them."""
    offsets, agreed = [], known
    for n in range(1, len(ids) + 1):
        if ids[n - 1] in special:
            offsets.append((agreed - known + at,) * 2)
            continue
        prefix, start = (text if n == len(ids) else decode(context + ids[:n])), agreed
        agreed = max(agreed, len(os.path.commonprefix([prefix, text])))
        # A prefix that stops inside a character ends in replacement marks that the whole text does not have there.
        inside = agreed < min(len(prefix), len(text))
        if agreed + inside == start and text[known:start].endswith("\ufffd"):
            start -= 1                     # one more byte of what is shown as a single replacement mark
        offsets.append((start - known + at, agreed + inside - known + at))
    return offsets
