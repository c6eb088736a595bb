"""Query strategies, which choose the public points to ask about."""
