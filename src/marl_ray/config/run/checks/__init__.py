"""The checks of a run's keys against each other: a module for each subject, whose `check` refuses what cannot be."""
