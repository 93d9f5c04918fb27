"""The loop of every training worker.

It collects, updates, reports and writes checkpoints. It knows no Ray; callers pass functions in.
"""
