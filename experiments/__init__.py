"""Reward designs, baselines and studies: what the paper compares with.

Nothing imports this room.
"""
