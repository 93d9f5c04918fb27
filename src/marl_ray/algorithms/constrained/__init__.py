"""Named algorithms that hold expected costs within budgets."""
