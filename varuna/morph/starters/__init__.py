"""Ways to start agents on other machines, and nothing else: the same job runs on each of them."""
