"""Web agents in a real browser: tasks, evaluators, and an environment of texts around Chromium."""
