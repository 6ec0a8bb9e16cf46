"""Evaluation (§4): metrics, spans, benchmarks, the judge and the sandbox of eval.py."""
