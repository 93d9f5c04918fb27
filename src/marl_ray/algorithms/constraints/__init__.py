"""The mathematics of budgets.

It has multipliers, penalties, trust regions, and the comparison of episodes with budgets.
"""
