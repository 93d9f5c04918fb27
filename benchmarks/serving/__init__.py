"""The gateway under load: its speed, its memory, its rollbacks and its sample ratios."""
