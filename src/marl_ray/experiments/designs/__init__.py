"""Experiments planned and judged by an analyst: sizes, one look at the end, sharper estimates."""
