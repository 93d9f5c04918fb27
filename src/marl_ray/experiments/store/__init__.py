"""The experiment store: experiments, exposures and outcomes in a SQL database."""
