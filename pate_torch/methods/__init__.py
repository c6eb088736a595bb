"""Who answers questions: teachers together, records themselves, votes from a file. DP-SGD asks nobody: the baseline."""
