"""Annotation against a bare asyncio loop over the same client, on a loopback server that answers in 200 ms.

    python tests/bench_annotation.py                  # 2,000 rows, 16 to 256 at once; then the fault mix

Both sides run in processes of their own, in turn, against the same server; the client is imported before the clock starts.
Ours forecasts, journals every reply, reads and grounds it and writes the final file; the bare loop only sends and receives.
Memory is the peak resident set of the process with 2,000 rows and with 500.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]


def write_data(path: Path, rows: int):
    """Toy summaries with errors, as SLF5K rows."""
    import toy
    from data import write_rows
    rng = random.Random(0)
    write_rows(path, ({"id": row["id"], "post": row["post"], "response": toy.write_draft(row["facts"], rng)}
                      for row in toy.rows("train", rows)))


async def bare(url: str, data: str, concurrency: int):
    """The peer: the client, a shared iterator, nothing else."""
    import openai
    from annotate import annotation_messages
    from data import examples, get_task, iter_rows
    task = get_task("slf5k")
    waiting = examples(task, iter_rows(data))

    async def worker():
        for example in waiting:
            await client.chat.completions.create(model="gpt-4o", messages=annotation_messages(task, example),
                                                 temperature=0.3, top_p=0.95, max_tokens=1200)
    async with openai.AsyncOpenAI(base_url=url, max_retries=0) as client:
        await asyncio.gather(*(worker() for _ in range(concurrency)))


def side(name: str, url: str, data: str, output: str, concurrency: int) -> dict:
    """Run one side in this process → {seconds, peak_mb, said}."""
    import openai  # noqa: F401  before the clock starts
    from annotate import AnnotateConfig, annotate
    from data import InputError
    start, said = time.perf_counter(), ""
    if name == "bare":
        asyncio.run(bare(url, data, concurrency))
    else:
        try:
            said = annotate(AnnotateConfig(data=data, output=output, base_url=url, concurrency=concurrency, price_in=2.5,
                                           price_out=10.0, timeout=2.0))
        except InputError as error:
            said = str(error)
    return {"seconds": time.perf_counter() - start, "said": said,
            "peak_mb": int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024 / 1e6}


def run(name: str, url: str, data: Path, concurrency: int) -> dict:
    """One side in a fresh process."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run([sys.executable, __file__, "--side", name, url, str(data), f"{directory}/f.jsonl",
                               str(concurrency)], capture_output=True, text=True, env=os.environ | {"OPENAI_API_KEY": "x"})
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        return json.loads(done.stdout.splitlines()[-1])


def race(url: str, data: Path, concurrency: int, rounds: int) -> dict:
    """{"ours": [seconds], "bare": [seconds], "peak_mb": of ours}, one side after the other."""
    out = {"ours": [], "bare": []}
    for turn in range(rounds):
        for name in ("bare", "ours")[:: -1 if turn % 2 else 1]:
            result = run(name, url, data, concurrency)
            out[name].append(result["seconds"])
            out |= {"peak_mb": result["peak_mb"]} if name == "ours" else {}
    return out


def measure(rows: int = 2000, concurrency: int = 64, rounds: int = 3, others=()) -> dict:
    """{"ours": [seconds], "bare": [seconds], "peak_mb": {rows: MB}, "faults": {seconds, calls,
    said}, and for each of the other concurrencies a `race`}."""
    from loopback import MIX, loopback
    with tempfile.TemporaryDirectory() as directory:
        data, small = Path(directory, "rows.jsonl"), Path(directory, "small.jsonl")
        write_data(data, rows)
        write_data(small, rows // 4)
        with loopback(process=True, delay=0.2) as server:
            out = {other: race(server.url, data, other, rounds) for other in others}
            out |= race(server.url, data, concurrency, rounds)
            few = run("ours", server.url, small, concurrency)
            out["peak_mb"] = {rows: out["peak_mb"], rows // 4: few["peak_mb"]}
        with loopback(process=True, delay=0.2, faults=MIX, hang=10) as server:
            result = run("ours", server.url, data, concurrency)
            out["faults"] = {"seconds": result["seconds"], "calls": server.stats()["calls"], "said": result["said"]}
    return out


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        name, url, data, output, concurrency = arguments.side
        print("\n" + json.dumps(side(name, url, data, output, int(concurrency))))
        return
    found = measure(arguments.rows, rounds=arguments.rounds, others=(16, 256))
    for concurrency, times in ((16, found[16]), (64, found), (256, found[256])):
        for name in ("ours", "bare"):
            rates = [arguments.rows / seconds for seconds in times[name]]
            print(f"{concurrency} at once, {name}: {statistics.median(rates):.0f} rows/s "
                  f"({min(rates):.0f}–{max(rates):.0f})")
        ratios = [bare / ours for ours, bare in zip(times["ours"], times["bare"])]
        print(f"{concurrency} at once, ours / bare: {statistics.median(ratios):.3f} "
              f"({min(ratios):.3f}–{max(ratios):.3f})")
    print(f"peak memory: {found['peak_mb']}")
    print(f"fault mix: {found['faults']['calls']} calls for {arguments.rows} rows in {found['faults']['seconds']:.0f} s; "
          f"{found['faults']['said']}")


if __name__ == "__main__":
    main()
