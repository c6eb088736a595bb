"""Private methods: PATE, votes from a file, reverse k-NN labeling, per-record gradients, and DP-SGD as a baseline."""
