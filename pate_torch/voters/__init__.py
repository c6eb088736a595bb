"""Who answers questions: teachers together, records themselves, votes from a file."""
