"""Scores while a team trains: whole episodes from fixed starts, held-out tasks, recent episodes."""
