"""The checks of a run's keys against each other, a module with a function `check` for each subject."""
