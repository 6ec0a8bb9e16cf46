"""Reward designs, baselines (the paper's and others), and studies that compare them.

text2grad.py and the other scripts beside it do not import this package.
"""
