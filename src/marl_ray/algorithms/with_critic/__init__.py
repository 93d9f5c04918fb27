"""Named algorithms whose baseline is a critic, for one agent and for teams."""
