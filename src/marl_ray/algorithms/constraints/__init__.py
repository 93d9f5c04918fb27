"""The mathematics of budgets: multipliers, penalties, trust regions, and how episodes stand against them."""
