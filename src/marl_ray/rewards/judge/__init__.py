"""A language model behind a URL as the judge of answers, with a cache, deadlines and a limit on what it costs."""
