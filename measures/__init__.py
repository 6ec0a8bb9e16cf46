"""What eval.py reads with: metrics, spans, benchmarks, the judge, the sandbox (§4)."""
