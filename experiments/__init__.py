"""Reward designs, baselines and studies that the paper compares Text2Grad with.

None of the scripts imports this package.
"""
