"""What K, noise and number of queries a privacy budget allows, and what labels they will give."""
