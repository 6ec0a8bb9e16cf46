"""Reward designs, baselines (the paper's and others), and studies that compare them.

None of the scripts imports this package.
"""
