"""The mathematics of budgets: multipliers, penalties, trust regions, and the comparison of episodes with budgets."""
