"""Designs that an analyst chooses: sizes, one test at the end, sharper estimates, Thompson sampling."""
