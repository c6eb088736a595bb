"""What K, noise and number of questions a privacy budget allows, and what labels they will give."""
