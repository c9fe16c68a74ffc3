"""Pages for readers: the site with catalogue and leaderboards."""
