"""Evaluation (§4): what eval.py measures with. policy.py also uses the sandbox."""
