"""Designs that an analyst chooses: sample sizes, one test at the end, sharper estimates, traffic that follows the
evidence."""
