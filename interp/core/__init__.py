"""Numbers and labels: nothing in here has ever heard of a transformer."""
