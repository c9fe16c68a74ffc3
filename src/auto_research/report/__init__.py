"""Pages for readers: catalogue, paper pages, leaderboards and the static site, all derived from cards and results."""
