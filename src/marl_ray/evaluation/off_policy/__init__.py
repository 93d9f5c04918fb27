"""What would a bundle earn where others were served? Judged on logged units, before any user meets it."""
